"""MaskInit of the paper's Algorithms 2 and 3: the mask of a client before its first update."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch

from fedspa.core.errors import UserError
from fedspa.core.launch import usable_cores
from fedspa.core.packed_mask import PackedMask
from fedspa.core.randomness import generator
from fedspa.core.weights import ParameterSpace
from fedspa.masks.base import MaskSearcher


def random_mask(space: ParameterSpace, active: Sequence[int], source: torch.Generator) -> torch.Tensor:
    """A mask with exactly `active[i]` random bits in the i-th piece of `mask_sizes`: float32 [total] on the CPU."""
    bits = torch.zeros(sum(space.mask_sizes))
    for piece, count in zip(bits.split(space.mask_sizes), active, strict=True):
        if count == piece.numel():  # most tensors are dense, and need no draw
            piece.fill_(1)
        else:
            piece[torch.randperm(piece.numel(), generator=source)[:count]] = 1
    return space.mask_of(bits)


class InitialMasks:
    """Draws first masks: one for all clients, or one for each client, reproduced on demand.

    The masks drawn last are cached, so that tests of a few hundred clients need not draw them again.
    """

    KEPT = 256

    def __init__(self, space: ParameterSpace, active: Sequence[int], *, shared: bool, seed: int) -> None:
        self._space, self._active, self._seed = space, tuple(active), seed
        self._shared = self._draw(-1) if shared else None
        self._per_client = lru_cache(self.KEPT)(self._draw)

    @classmethod
    def of(cls, searcher: MaskSearcher, space: ParameterSpace, seed: int) -> InitialMasks:
        """The first masks of a searcher that draws them at random, over the tensors that travel."""
        counts = searcher.first_counts
        if not isinstance(counts, Sequence):
            raise UserError(
                f"mask={searcher.name} ({type(searcher).__module__}.{type(searcher).__qualname__}) has no count of "
                "each tensor for the first masks, which are drawn at random: counts(-1) must say them."
            )
        if space.channels is None:
            counts = (*counts, *space.running.sizes)
        return cls(space, counts, shared=searcher.initial == "same", seed=seed)

    def _draw(self, client: int) -> PackedMask:
        source = generator(self._seed, "initial_mask", client=client)
        return PackedMask.pack(random_mask(self._space, self._active, source))

    def draw_ahead(self, clients: int) -> None:
        """Draw the masks of the first clients in threads, as many as are cached."""
        if self._shared is None:
            with ThreadPoolExecutor(usable_cores()) as threads:
                list(threads.map(self._per_client, range(min(clients, self.KEPT))))

    def __call__(self, client: int) -> PackedMask:
        """The first mask of a client; the same object for all clients that share it."""
        return self._shared or self._per_client(client)
