"""SNIP: single-shot pruning by connection sensitivity (Lee, Ajanthan and Torr, ICLR 2019).

At its first update a client gets the dense global weights w. It computes the gradient g of one of its mini-batches at
w, and keeps the parameters of largest |g * w|. After that its mask never changes.

As published, the sensitivities of all tensors compete, biases and norms included. Only the total is that of the
layer sparsity. The original prunes an untrained network; here a client prunes the global weights of its
first update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedspa.core.limits import limited
from fedspa.masks.base import Counts, MaskSearcher
from fedspa.masks.search_input import SearchInput
from fedspa.masks.select import by_piece, largest


@dataclass(kw_only=True)
class SNIP(MaskSearcher):
    """One search for each client, at its first update. No client has a mask before it."""

    scope: str = limited("global", choices=("global", "tensor"))
    """The parameters that compete: those of all tensors (global, as published), or those of each tensor for the count
    that the layer sparsity gives it (tensor)."""

    initial: ClassVar[str] = "same"  # type: ignore[misc]  # no mask is drawn: not a setting

    searches_first = True

    def counts(self, round: int) -> Counts:
        return sum(self.target) if self.scope == "global" else self.target

    def first_mask(self, search: SearchInput) -> torch.Tensor:
        """Keep the parameters of largest |g * w|, exactly as many as the layer sparsity allows."""
        assert search.gradient is not None
        sensitivity = (search.gradient * search.weights).abs()
        if self.scope == "global":
            return largest(sensitivity, sum(self.target)).to(search.mask)
        return by_piece(largest, search.space.split, (sensitivity,), self.target).to(search.mask)

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        return search.mask
