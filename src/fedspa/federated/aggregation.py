"""Aggregation: the weighted mean of the updates of a round."""

from __future__ import annotations

import torch

from fedspa.core.client import ClientUpdate
from fedspa.core.server import Aggregate
from fedspa.core.weights import ParameterSpace


class Aggregator:
    """Adds the updates of a round to one running sum, in the order of the calls.

    The weights a_k are shares of the participants' total weight (paper, Eq. 4: 1 / |S_t| each). With `holders` they
    are shares of the weight of those participants whose mask has the coordinate. The mean of a coordinate that is
    in no mask is 0.
    """

    def __init__(self, normaliser: str, clients: int, space: ParameterSpace) -> None:
        """`clients`: the number of clients of the whole federation."""
        self._per_coordinate, self._clients, self._space = normaliser == "holders", clients, space
        self._sum: torch.Tensor | None = None
        self._held: torch.Tensor | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._weight, self._count = 0.0, 0

    def add(self, update: ClientUpdate, weight: float) -> None:
        """Add the message of one client. `weight`: a_k before the normalisation."""
        if update.update is None and not update.tensors:
            return
        self._weight += weight
        self._count += 1
        if update.update is not None:
            self._sum = _plus(self._sum, update.update, weight)
            if self._per_coordinate:
                mask = torch.ones_like(update.update) if update.mask is None else update.mask
                self._held = _plus(self._held, mask, weight)
        for name, tensor in update.tensors.items():
            self._tensors[name] = _plus(self._tensors.get(name), tensor, weight)

    def result(self) -> Aggregate | None:
        """The aggregate; None if no client sent anything."""
        if not self._count:
            return None
        update = None
        if self._sum is not None and self._held is None:
            update = self._sum / self._weight
        elif self._sum is not None and self._held is not None:
            update = torch.where(self._held > 0, self._sum / self._held, 0.0)
        means = {name: tensor / self._weight for name, tensor in self._tensors.items()}
        held = None if self._held is None else self._held > 0
        return Aggregate(update, means, self._space, self._count / self._clients, held)


def _plus(total: torch.Tensor | None, tensor: torch.Tensor, weight: float) -> torch.Tensor:
    """The running sum `total`, to which the weighted tensor is added in place; None: a new sum."""
    return (torch.zeros_like(tensor) if total is None else total).add_(tensor, alpha=weight)
