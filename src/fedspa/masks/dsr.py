"""DSR: dynamic sparse reparameterization (Mostafa and Wang, ICML 2019).

After its local training a client drops all weights whose magnitude lies below one threshold H for all tensors. As many
random parameters grow and start from 0. Just dropped parameters come back only if there are no others. The new
parameters of a tensor are in proportion to the weights that it kept. If fewer than 0.9 or more than 1.1 of the wanted
number were dropped, the client doubles or halves its H.

A tensor keeps its largest weight for any H: an empty tensor could not grow again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedspa.core.client_state import Item
from fedspa.core.limits import limited
from fedspa.masks.dynamic import Moving
from fedspa.masks.search_input import SearchInput, random_scores
from fedspa.masks.select import by_piece, without_smallest

THRESHOLD = "search.threshold"
"""The name of a client's H in its state: float64 [1]."""


@dataclass(kw_only=True)
class DSR(Moving):
    """Drops weights below one threshold, and regrows at random."""

    threshold: float = limited(1e-3, low=0, low_open=True)
    """The threshold H of a client's first search."""
    share: float = limited(0.1, low=0, high=1)
    """The wanted number of dropped weights, as a share of the active weights in sparse tensors."""

    grows_from_zero = True

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        if not self.searching(search.round):
            return search.mask
        vectors = (search.mask, search.weights.abs())
        kept = by_piece(without_smallest, search.space.split, vectors, self._dropped(search))
        draws = random_scores(search)
        draws[search.mask.bool() & ~kept] = -1
        return self.regrown(search, kept, draws, search.space.count(kept))

    def _dropped(self, search: SearchInput) -> list[int]:
        """The number of dropped weights of each tensor."""
        low = search.space.count((search.weights.abs() < self._threshold(search)) & search.mask.bool())
        counts = zip(low, search.counts, self.sparse, strict=True)
        return [min(below, max(count - 1, 0)) if sparse else 0 for below, count, sparse in counts]

    def _threshold(self, search: SearchInput) -> float:
        known = search.memory.get(THRESHOLD)
        return float(known) if isinstance(known, torch.Tensor) else self.threshold

    def remember(self, search: SearchInput, next_mask: torch.Tensor) -> Mapping[str, Item]:
        threshold = self._threshold(search)
        if self.searching(search.round):
            active = sum(count for count, sparse in zip(search.counts, self.sparse, strict=True) if sparse)
            dropped, wanted = sum(self._dropped(search)), self.share * active
            threshold *= 2 if dropped < 0.9 * wanted else 0.5 if dropped > 1.1 * wanted else 1
        kept = {THRESHOLD: torch.tensor([threshold], dtype=torch.float64)}
        return {**super().remember(search, next_mask), **kept}
