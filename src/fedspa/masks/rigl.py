"""RigL as published (Evci, Gale, Menick, Castro and Elsen, ICML 2020), once a visit.

After its local training a client drops the active weights of smallest magnitude and grows as many coordinates of
largest gradient, tensor by tensor, the just dropped ones among the candidates. The share that changes falls along a
cosine to 0 at a part of the run, from where on masks stay and no gradient is taken.

It differs from DST in what a new connection starts from. There it takes the server's dense value (a warm start); here
it starts from 0 at the client's next visit. One that was dropped and grown at once is not new.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedspa.core.errors import check_range
from fedspa.core.packed_mask import PackedMask
from fedspa.masks.base import MaskSearcher
from fedspa.masks.search_input import SearchInput
from fedspa.masks.select import drop_and_grow

if TYPE_CHECKING:
    from fedspa.core.client_state import Item

GROWN = "search.grown"
"""The name, in a client's state, of the coordinates that start from 0 at its next update."""


@dataclass(kw_only=True)
class RigL(MaskSearcher):
    """Prune by magnitude, regrow by gradient from zero."""

    alpha: float = 0.3
    """Share of a tensor's active weights that the first search exchanges."""
    anneal_rounds: int = 1000
    """The run's rounds unless set, whatever the run's own length."""
    end: float = 0.75
    """Share of those rounds after which masks stay: T_end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("mask.alpha", self.alpha, low=0, high=1)
        check_range("mask.anneal_rounds", self.anneal_rounds, low=1)
        check_range("mask.end", self.end, low=0, high=1, low_open=True)

    @property
    def searches(self) -> bool:
        return True

    @property
    def needs_gradient(self) -> bool:
        return True

    def searching(self, round: int) -> bool:
        return round < self.end * self.anneal_rounds

    def drop_fraction(self, round: int) -> float:
        """alpha / 2 (1 + cos(pi t / T_end)), t from 0; 0 from T_end on."""
        if not self.searching(round):
            return 0.0
        return 0.5 * self.alpha * (1 + math.cos(math.pi * round / (self.end * self.anneal_rounds)))

    def describe(self, round: int) -> dict[str, float]:
        return {"prune_rate": self.drop_fraction(round)}

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        """Exchange floor(fraction x active) coordinates of each tensor, as the published code rounds."""
        if not self.searching(search.round):
            return search.mask
        assert search.gradient is not None
        fraction = self.drop_fraction(search.round)
        # The small slack keeps 0.29 x 100, which is 28.999999999999996 in binary, at 29.
        exchanged = [math.floor(fraction * active + 1e-9) for active in search.counts]
        vectors = (search.mask, search.weights.abs(), search.gradient.abs())
        pieces = zip(*map(search.space.split, vectors), exchanged, strict=True)
        return torch.cat([drop_and_grow(*piece) for piece in pieces])

    def remember(self, search: SearchInput, next_mask: torch.Tensor) -> Mapping[str, Item]:
        """Which of the next mask's coordinates were inactive until now."""
        if next_mask is search.mask:
            return {}
        return {GROWN: PackedMask.pack(next_mask * (1 - search.mask))}

    def start(self, weights: torch.Tensor, mask: torch.Tensor, memory: Mapping[str, Item]) -> torch.Tensor:
        """mask * w, but 0 where the mask has just grown."""
        start, grown = mask * weights, memory.get(GROWN)
        if isinstance(grown, PackedMask):
            start[: grown.length] *= 1 - grown.unpack(like=weights)
        return start
