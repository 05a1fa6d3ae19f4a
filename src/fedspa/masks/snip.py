"""SNIP: single-shot pruning by connection sensitivity (Lee, Ajanthan and Torr, ICLR 2019).

At its first visit a client gets the dense global weights w, takes the gradient g of the loss of one of its
mini-batches at w, and keeps the parameters of largest |g * w|. Then its mask never changes.

As published, the sensitivities of all tensors compete, biases and norms included; only their total is that of the
layer sparsity. Where the original prunes an untrained network, a client here prunes what the server has at its
first visit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedspa.core.errors import check_choice
from fedspa.masks.base import MaskSearcher
from fedspa.masks.search_input import SearchInput
from fedspa.masks.select import largest


@dataclass(kw_only=True)
class SNIP(MaskSearcher):
    """One search in a client's life; no client has a mask before it."""

    scope: str = "global"
    """Which parameters compete: those of all tensors (global, as published), or those of each tensor for the places
    that the layer sparsity gives it (tensor)."""

    initial: ClassVar[str] = "same"  # type: ignore[misc]  # no mask is drawn: not a setting

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mask.scope", self.scope, ("global", "tensor"))

    @property
    def searches(self) -> bool:
        return False

    @property
    def needs_gradient(self) -> bool:
        return False

    @property
    def searches_first(self) -> bool:
        return True

    @property
    def keeps_counts(self) -> bool:
        return self.scope == "tensor"

    def first_mask(self, search: SearchInput) -> torch.Tensor:
        """Keep exactly as many parameters as the layer sparsity allows, those of largest |g * w|."""
        assert search.gradient is not None
        sensitivity = (search.gradient * search.weights).abs()
        if self.scope == "global":
            return largest(sensitivity, sum(search.active)).to(search.mask)
        pieces = zip(search.space.split(sensitivity), search.active, strict=True)
        return torch.cat([largest(piece, count) for piece, count in pieces]).to(search.mask)

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        return search.mask
