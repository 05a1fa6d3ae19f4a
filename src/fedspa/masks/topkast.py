"""Top-KAST (Jayakumar, Pascanu, Rae, Osindero and Elsen, NeurIPS 2020).

The network sees only the D largest weights of each tensor, but the D + M largest ones are trained: the M others are 0
in the forward pass, and follow the gradient there until they are large enough.

In a federation the client's mask is the larger set B, which is updated and travels. The smaller set A is the forward
mask, computed from the weights at each use. B are the D + M largest of the client's trained weights and, outside B,
of the server's dense weights. So clients receive all weights in the rounds that search. Weight decay is the
same in A and in B; the published penalty divides it by D outside A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedspa.core.limits import limited
from fedspa.masks.base import Counts
from fedspa.masks.dynamic import DynamicSearcher
from fedspa.masks.search_input import SearchInput
from fedspa.masks.select import by_piece, largest, whole


@dataclass(kw_only=True)
class TopKAST(DynamicSearcher):
    """Searches by magnitude with exploration. D are the counts of the layer sparsity."""

    explore: float = limited(0.2, low=0, high=1)
    """M: the share of a tensor's parameters that are trained but not active in the forward pass."""

    label: ClassVar[str] = "Top-KAST"
    initial: ClassVar[str] = "same"  # type: ignore[misc]  # no mask is drawn: not a setting

    searches_first = True
    needs_first_gradient = False

    def counts(self, round: int) -> Counts:
        pairs = zip(self.target, self.sizes, strict=True)
        return [min(count + whole(self.explore * size), size) for count, size in pairs]

    def receives_dense(self, round: int) -> bool:
        return self.searching(round)

    def first_mask(self, search: SearchInput) -> torch.Tensor:
        return self._top(search, search.weights)

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        if search.received is None:
            return search.mask
        return self._top(search, torch.where(search.mask > 0, search.weights, search.received))

    def _top(self, search: SearchInput, weights: torch.Tensor) -> torch.Tensor:
        """The D + M largest of dense weights [trained], tensor by tensor."""
        counts = self.counts(search.round)
        assert not isinstance(counts, int | None)
        return by_piece(largest, search.space.split, (weights.abs(),), counts).to(search.mask)

    def forward_mask(self, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """A: the D largest weights of each tensor within the mask."""
        scores = weights.abs().masked_fill(mask == 0, -torch.inf)
        *pieces, statistics = scores.split([*self.sizes, len(scores) - sum(self.sizes)])
        active = [largest(piece, count) for piece, count in zip(pieces, self.target, strict=True)]
        return torch.cat([*active, torch.ones_like(statistics)]).to(mask)
