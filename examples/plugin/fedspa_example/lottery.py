"""Lottery: as DST, but what grows is drawn by lot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspa.core.limits import limited
from fedspa.masks.dynamic import DynamicSearcher
from fedspa.masks.search_input import SearchInput
from fedspa.masks.select import by_piece, drop_and_grow


@dataclass(kw_only=True)
class Lottery(DynamicSearcher):
    """Exchanges the same share of every tensor's active weights in every search."""

    share: float = limited(0.1, low=0, high=1)

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        if not self.searching(search.round):
            return search.mask
        draws = torch.rand(search.space.total, generator=search.generator).to(search.weights)
        counts = [int(self.share * count) for count in search.counts]
        vectors = (search.mask, search.weights.abs(), draws)
        return by_piece(drop_and_grow, search.space.split, vectors, counts)
