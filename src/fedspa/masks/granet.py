"""GraNet: gradual pruning with neuroregeneration (Liu et al., NeurIPS 2021).

GraNet prunes as GMP does. After each pruning a client also exchanges a share of its remaining weights: it drops the
smallest ones of each tensor and grows as many of largest gradient, which start from 0. The share falls along a cosine
to 0 at the end of the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspa.masks.dynamic import Annealed
from fedspa.masks.gmp import GMP
from fedspa.masks.search_input import SearchInput
from fedspa.masks.select import by_piece, drop_and_grow


@dataclass(kw_only=True)
class GraNet(GMP, Annealed):
    """Prunes by magnitude along a cubic schedule, and regrows by gradient."""

    scope: str = "global"
    alpha: float = 0.5

    exchanges = True
    needs_gradient = True
    grows_from_zero = True

    def describe(self, round: int) -> dict[str, float]:
        return super().describe(round) | {"prune_rate": self.drop_fraction(round)}

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        mask = super().next_mask(search)
        if search.gradient is None:  # the schedule is over, or no search is due
            return mask
        counts = self.exchanged(search.round, search.space.count(mask))
        vectors = (mask, search.weights.abs(), search.gradient.abs())
        return by_piece(drop_and_grow, search.space.split, vectors, counts)
