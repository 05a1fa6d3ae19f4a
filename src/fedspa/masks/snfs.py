"""SNFS: sparse networks from scratch, by sparse momentum (Dettmers and Zettlemoyer, 2019).

After its local training a client drops a share of each tensor's active weights, those of smallest magnitude. It grows
as many parameters in all. The tensors share the new parameters in proportion to the mean momentum of their active
weights. In each tensor the inactive parameters of largest momentum grow, and start from 0.

The momentum is an average of the dense gradients of one mini-batch at each search. It is part of the client's
state and takes as much memory as the network's weights, for each client with an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedspa.core.client_state import Item
from fedspa.core.limits import limited
from fedspa.masks.dynamic import Annealed, Moving
from fedspa.masks.search_input import SearchInput
from fedspa.masks.select import by_piece, without_smallest

MOMENTUM = "search.momentum"
"""The name of the average of a client's gradients in its state: [trained]."""


@dataclass(kw_only=True)
class SNFS(Annealed, Moving):
    """Regrows by momentum, and moves parameters to tensors of large momentum."""

    alpha: float = 0.5
    decay: float = limited(0.9, low=0, high=1, high_open=True)
    """m <- decay m + (1 - decay) g at each search; m is 0 at first."""

    needs_gradient = True
    grows_from_zero = True

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        momentum = self._momentum(search)
        if momentum is None or search.gradient is None:  # masks stay in this round
            return search.mask
        strength = momentum.abs()
        exchanged = zip(self.exchanged(search.round, search.counts), self.sparse, strict=True)
        dropped = [count * sparse for count, sparse in exchanged]
        vectors = (search.mask, search.weights.abs())
        kept = by_piece(without_smallest, search.space.split, vectors, dropped)
        sums = [float(piece.sum(dtype=torch.float64)) for piece in search.space.split(strength * search.mask)]
        shares = [total / max(count, 1) for total, count in zip(sums, search.counts, strict=True)]
        return self.regrown(search, kept, strength, shares)

    def _momentum(self, search: SearchInput) -> torch.Tensor | None:
        """The average [trained] with this search's gradient in it; None before the first gradient."""
        before, gradient = search.memory.get(MOMENTUM), search.gradient
        assert before is None or isinstance(before, torch.Tensor)
        if gradient is None:
            return before
        now = (1 - self.decay) * gradient
        return now if before is None else now + self.decay * before

    def remember(self, search: SearchInput, next_mask: torch.Tensor) -> Mapping[str, Item]:
        momentum = self._momentum(search)
        return {**super().remember(search, next_mask), **({} if momentum is None else {MOMENTUM: momentum})}
