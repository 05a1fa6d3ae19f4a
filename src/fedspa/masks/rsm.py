"""RSM: random static masks (paper, Algorithm 2). The mask drawn at the start never changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedspa.masks.base import MaskSearcher
from fedspa.masks.search_input import SearchInput

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class RSM(MaskSearcher):
    """With `initial=same` all clients share one sub-network; with `different` each client has another one."""

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        return search.mask
