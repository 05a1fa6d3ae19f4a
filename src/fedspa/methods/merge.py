"""The server's step, the same for every method: w - sum over k of a_k U_k."""

from __future__ import annotations

import torch


class Merge:
    """Folds the updates of a round into one running sum, strictly in the order in which they come.

    Weights a_k are shares of the participants' total weight (paper, Eq. 4: 1 / |S_t| each), or, with
    `holders`, of the weight of those participants whose mask holds the coordinate; a coordinate that
    nobody holds keeps its value.
    """

    def __init__(self, normaliser: str) -> None:
        self._per_coordinate = normaliser == "holders"
        self._sum: torch.Tensor | None = None
        self._held: torch.Tensor | None = None
        self._weight = 0.0

    def fold(self, update: torch.Tensor, weight: float, holds: torch.Tensor | None = None) -> None:
        """Add one client's update U_k [total], which speaks of the coordinates `holds` (None: all)."""
        self._weight += weight
        if self._sum is None:
            self._sum = torch.zeros_like(update)
        self._sum.add_(update, alpha=weight)
        if self._per_coordinate:
            if self._held is None:
                self._held = torch.zeros_like(update)
            self._held.add_(torch.ones_like(update) if holds is None else holds, alpha=weight)

    def apply(self, weights: torch.Tensor) -> torch.Tensor:
        """The next global weights [total]; `weights` themselves where nothing was folded."""
        if self._sum is None:
            return weights
        if self._held is None:
            return weights - self._sum / self._weight
        return weights - torch.where(self._held > 0, self._sum / self._held, 0.0)
