"""MaskInit of the paper's Algorithms 2 and 3: the mask of a client that was never visited."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from fedspa.core.packed_mask import PackedMask
from fedspa.core.randomness import generator
from fedspa.core.weights import ParameterSpace


def random_mask(space: ParameterSpace, active: Sequence[int], source: torch.Generator) -> torch.Tensor:
    """A mask with exactly `active[i]` random ones in the i-th tensor: float32 [total] on the CPU."""
    mask = torch.zeros(space.total)
    for piece, count in zip(space.split(mask), active, strict=True):
        if count == piece.numel():  # nothing to choose: most tensors are dense, so spare the draw
            piece.fill_(1)
        else:
            piece[torch.randperm(piece.numel(), generator=source)[:count]] = 1
    return mask


class InitialMasks:
    """Draws first masks: one that all clients share, or one for each client, reproduced on demand.

    The last ones drawn are kept, so that tests of a few hundred clients need not draw them again each time.
    """

    KEPT = 256

    def __init__(self, space: ParameterSpace, active: Sequence[int], *, shared: bool, seed: int) -> None:
        self._space, self._active, self._seed = space, tuple(active), seed
        self._shared = self._draw(-1) if shared else None
        self._own = lru_cache(self.KEPT)(self._draw)

    def _draw(self, client: int) -> PackedMask:
        source = generator(self._seed, "initial_mask", client=client)
        return PackedMask.pack(random_mask(self._space, self._active, source))

    def __call__(self, client: int) -> PackedMask:
        """The first mask of a client: the same object for all where they share it."""
        return self._shared or self._own(client)
