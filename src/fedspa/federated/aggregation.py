"""Aggregation: the weighted mean of the updates of a round."""

from __future__ import annotations

import torch

from fedspa.core.client import ClientUpdate
from fedspa.core.server import Aggregate


class Aggregator:
    """Adds the updates of a round to one running sum, strictly in the order in which they come.

    The weights a_k are shares of the participants' total weight (paper, Eq. 4: 1 / |S_t| each), or, with
    `holders`, of the weight of those participants whose mask holds the coordinate; the mean of a coordinate that
    nobody holds is 0.
    """

    def __init__(self, normaliser: str, clients: int, trained: int) -> None:
        """`clients`: of the whole federation; `trained`: the number of parameters."""
        self._per_coordinate, self._clients, self._trained = normaliser == "holders", clients, trained
        self._sum: torch.Tensor | None = None
        self._held: torch.Tensor | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._weight, self._count = 0.0, 0

    def add(self, update: ClientUpdate, weight: float) -> None:
        """Add what one client sent, if anything. `weight`: a_k up to the normalisation."""
        if update.update is None and not update.tensors:
            return
        self._weight += weight
        self._count += 1
        if update.update is not None:
            self._add(update.update, update.mask, weight)
        for name, tensor in update.tensors.items():
            self._tensors.setdefault(name, torch.zeros_like(tensor)).add_(tensor, alpha=weight)

    def _add(self, update: torch.Tensor, mask: torch.Tensor | None, weight: float) -> None:
        if self._sum is None:
            self._sum = torch.zeros_like(update)
        self._sum.add_(update, alpha=weight)
        if self._per_coordinate:
            if self._held is None:
                self._held = torch.zeros_like(update)
            self._held.add_(torch.ones_like(update) if mask is None else mask, alpha=weight)

    def result(self) -> Aggregate | None:
        """The aggregate; None where no client sent anything."""
        if not self._count:
            return None
        update = None
        if self._sum is not None and self._held is None:
            update = self._sum / self._weight
        elif self._sum is not None and self._held is not None:
            update = torch.where(self._held > 0, self._sum / self._held, 0.0)
        means = {name: tensor / self._weight for name, tensor in self._tensors.items()}
        return Aggregate(update, means, self._trained, self._count / self._clients)
