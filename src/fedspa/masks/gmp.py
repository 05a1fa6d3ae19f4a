"""GMP: gradual magnitude pruning (Zhu and Gupta, ICLR workshop 2018).

Clients start dense, or at a small sparsity. After each update they drop their smallest weights, until a part of the run
is over. A client's density is the planned one for the round of its last update, so a client with a late first update
prunes in one jump. Nothing is regrown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedspa.core.limits import limited
from fedspa.masks.base import Counts
from fedspa.masks.dynamic import Scheduled
from fedspa.masks.search_input import SearchInput
from fedspa.masks.select import by_piece, whole, without_smallest


@dataclass(kw_only=True)
class GMP(Scheduled):
    """Prunes by magnitude along a cubic schedule."""

    scope: str = limited("tensor", choices=("global", "tensor"))
    """The weights that compete: those of each tensor for its planned count (tensor), or those of all sparse tensors for
    the planned total (global)."""
    initial_sparsity: float = limited(0.0, low=0, high=1)
    """The share of a sparse tensor's parameters that the random first mask leaves out, at most its final sparsity."""

    exchanges: ClassVar[bool] = False

    def searching(self, round: int) -> bool:
        """True after T_end too: a client may take part for the first time then."""
        return round % self.interval == 0

    def exchanging(self, round: int) -> bool:
        return self.exchanges and self.searching(round) and round < self.end * self.anneal_rounds

    def counts(self, round: int) -> Counts:
        """target + (first - target) (1 - (t + 1) / T_end)^3 of each tensor, t from 0; or their sum."""
        left = max(1 - (round + 1) / (self.end * self.anneal_rounds), 0.0) ** 3
        counts = []
        for size, target in zip(self.sizes, self.target, strict=True):
            first = max(target, whole((1 - self.initial_sparsity) * size))
            counts.append(target + whole((first - target) * left))
        return sum(counts) if self.scope == "global" and round >= 0 else counts

    def describe(self, round: int) -> dict[str, float]:
        counts = self.counts(round)
        assert counts is not None
        active = counts if isinstance(counts, int) else sum(counts)
        return {"planned_density": active / max(sum(self.sizes), 1)}

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        planned = self.counts(search.round)
        if not self.searching(search.round) or planned in (list(search.counts), sum(search.counts)):
            return search.mask
        scores = search.weights.abs()
        if isinstance(planned, int):
            pairs = zip(search.space.split(scores), self.sparse, strict=True)
            competing = torch.cat([s if sparse else torch.full_like(s, torch.inf) for s, sparse in pairs])
            return without_smallest(search.mask, competing, sum(search.counts) - planned).to(search.mask)
        assert planned is not None
        dropped = [now - then for now, then in zip(search.counts, planned, strict=True)]
        vectors = (search.mask, scores)
        return by_piece(without_smallest, search.space.split, vectors, dropped).to(search.mask)
