"""Shared parts of searchers that keep searching: the rounds of a search, its schedule, the start of new parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedspa.core.limits import limited
from fedspa.core.packed_mask import PackedMask
from fedspa.masks.base import Counts, MaskSearcher
from fedspa.masks.search_input import SearchInput
from fedspa.masks.select import largest, share_out, whole

if TYPE_CHECKING:
    from fedspa.core.client_state import Item

GROWN = "search.grown"
"""The name, in a client's state, of the parameters that start from 0 at its next update."""


@dataclass(kw_only=True)
class DynamicSearcher(MaskSearcher):
    """A searcher whose masks change from update to update."""

    interval: int = limited(1, low=1)
    """The number of rounds from one search to the next; round 1 searches. A longer training between two searches
    explores more reliably (In-Time Over-Parameterization; Liu et al., ICML 2021)."""

    grows_from_zero: ClassVar[bool] = False
    """True if a parameter that was inactive starts from 0 at the client's next update. False: it starts from the
    server's dense value (a warm start)."""

    def searching(self, round: int) -> bool:
        return round % self.interval == 0

    def remember(self, search: SearchInput, next_mask: torch.Tensor) -> Mapping[str, Item]:
        """The newly active parameters of the next mask, if these start from 0."""
        if not self.grows_from_zero or next_mask is search.mask:
            return {}
        return {GROWN: PackedMask.pack(next_mask * (1 - search.mask))}

    def start(self, weights: torch.Tensor, mask: torch.Tensor, memory: Mapping[str, Item]) -> torch.Tensor:
        """mask * w, but 0 where the mask has just grown from zero."""
        start, grown = mask * weights, memory.get(GROWN)
        if isinstance(grown, PackedMask):
            start[: grown.length] *= 1 - grown.unpack(like=weights)
        return start


@dataclass(kw_only=True)
class Scheduled(DynamicSearcher):
    """A searcher with a schedule that ends before the run does."""

    anneal_rounds: int = limited(1000, low=1)
    """The schedule's number of rounds. By default it is the run's number of rounds."""
    end: float = limited(0.75, low=0, high=1, low_open=True)
    """The share of those rounds after which the schedule ends: T_end."""


@dataclass(kw_only=True)
class Annealed(Scheduled):
    """A searcher that exchanges a share of the active weights. The share falls along a cosine to 0 at T_end."""

    alpha: float = limited(0.3, low=0, high=1)
    """The share of the active weights that the first search exchanges."""

    def searching(self, round: int) -> bool:
        return super().searching(round) and round < self.end * self.anneal_rounds

    def drop_fraction(self, round: int) -> float:
        """alpha / 2 (1 + cos(pi t / T_end)), t from 0; 0 from T_end on."""
        if round >= self.end * self.anneal_rounds:
            return 0.0
        return 0.5 * self.alpha * (1 + math.cos(math.pi * round / (self.end * self.anneal_rounds)))

    def exchanged(self, round: int, counts: Sequence[int]) -> list[int]:
        """The weights of each tensor that a search exchanges: floor(fraction x active), as RigL's code rounds."""
        fraction = self.drop_fraction(round)
        # The small slack keeps 0.29 x 100, which is 28.999999999999996 in binary, at 29.
        return [whole(fraction * active) for active in counts]

    def describe(self, round: int) -> dict[str, float]:
        return {"prune_rate": self.drop_fraction(round)}


@dataclass(kw_only=True)
class Moving(DynamicSearcher):
    """A searcher that moves active parameters between tensors and keeps their total.

    Tensors that the layer sparsity leaves dense stay dense.
    """

    def counts(self, round: int) -> Counts:
        return self.target if round < 0 else sum(self.target)

    def regrown(
        self, search: SearchInput, kept: torch.Tensor, scores: torch.Tensor, shares: Sequence[float]
    ) -> torch.Tensor:
        """The next mask [trained]: the kept parameters, and as many new ones as were dropped.

        Args:
            kept: bool [trained].
            scores: [trained]; the parameters of largest score in each tensor grow.
            shares: the proportions of the tensors in the new parameters.
        """
        counts = search.space.count(kept)
        limits = [
            size - count if sparse else 0
            for size, count, sparse in zip(self.sizes, counts, self.sparse, strict=True)
        ]
        grown = share_out(sum(search.counts) - sum(counts), shares, limits)
        pieces = zip(search.space.split(kept), search.space.split(scores), grown, strict=True)
        return torch.cat(
            [piece | largest(score.masked_fill(piece, -torch.inf), k) for piece, score, k in pieces]
        ).to(search.mask)
