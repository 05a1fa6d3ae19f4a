"""MaskInit of the paper's Algorithms 2 and 3: the mask of a client before its first update."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

import torch

from fedspa.core.launch import usable_cores
from fedspa.core.packed_mask import PackedMask
from fedspa.core.randomness import generator
from fedspa.core.weights import ParameterSpace
from fedspa.masks.base import MaskSearcher


class InitialMasks:
    """Draws first masks: one for all clients, or one for each client, reproduced on demand.

    The masks drawn last are cached, so that tests of a few hundred clients need not draw them again.
    """

    KEPT = 256

    def __init__(self, draw: Callable[[torch.Generator], torch.Tensor], *, shared: bool, seed: int) -> None:
        """`draw`: makes a random mask [total] of zeros and ones."""
        self._random, self._seed = draw, seed
        self._shared = self._draw(-1) if shared else None
        self._per_client = lru_cache(self.KEPT)(self._draw)

    @classmethod
    def of(cls, searcher: MaskSearcher, space: ParameterSpace, seed: int) -> InitialMasks:
        """The first masks of a searcher that draws them at random, over the tensors that travel."""
        return cls(partial(searcher.random_mask, space), shared=searcher.initial == "same", seed=seed)

    def _draw(self, client: int) -> PackedMask:
        source = generator(self._seed, "initial_mask", client=client)
        return PackedMask.pack(self._random(source))

    def draw_ahead(self, clients: int) -> None:
        """Draw the masks of the first clients in threads, as many as are cached."""
        if self._shared is None:
            with ThreadPoolExecutor(usable_cores()) as threads:
                list(threads.map(self._per_client, range(min(clients, self.KEPT))))

    def __call__(self, client: int) -> PackedMask:
        """The first mask of a client; the same object for all clients that share it."""
        return self._shared or self._per_client(client)
