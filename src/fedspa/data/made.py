"""Images that are made when a client needs them, and forgotten again: a federation of any number of clients.

Rows are numbered through as in a set in memory: client k has `each` rows from k * each on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from fedspa.data.batches import Pixels
from fedspa.data.examples import Batch
from fedspa.data.image_set import Augmentation, ImageSet

KEPT = 4
"""Clients whose images are kept: a client update asks for the same ones in every batch."""


@dataclass(frozen=True)
class MadeImages:
    """The images of `clients` clients, `each` of them uint8 [each, *shape], made by `make`."""

    make: Callable[[int], ImageSet]
    """The images of a client: a pure function of its number."""
    clients: int
    each: int
    shape: tuple[int, ...]
    """Channels, height, width."""

    def __len__(self) -> int:
        return self.clients * self.each

    def rows(self, client: int) -> np.ndarray:
        """The rows int64 [each] of a client."""
        return np.arange(client * self.each, (client + 1) * self.each)

    def label_counts(self, classes: int) -> np.ndarray:
        """int64 [clients, classes]: how many images of each class every client has; makes them all."""
        counts = [torch.bincount(self.make(k).labels, minlength=classes) for k in range(self.clients)]
        return torch.stack(counts).numpy()

    def gather(self, rows: torch.Tensor) -> ImageSet:
        """The images and labels of any rows (int64 [n] on the CPU)."""
        clients = torch.unique(rows // self.each)
        sets = [self.make(int(client)) for client in clients]
        local = torch.searchsorted(clients, rows // self.each) * self.each + rows % self.each
        return ImageSet(
            torch.cat([made.images for made in sets])[local], torch.cat([made.labels for made in sets])[local]
        )


class MadePixels(Pixels):
    """`Pixels` of images that are made for each batch."""

    in_memory = False

    def __init__(
        self,
        images: MadeImages,
        mean: Sequence[float],
        std: Sequence[float],
        augmentation: Augmentation,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        empty = torch.empty(0, *images.shape, dtype=torch.uint8)
        super().__init__(
            ImageSet(empty, torch.empty(0, dtype=torch.int64)), mean, std, augmentation, device, dtype
        )
        self._made = images

        def client(number: int) -> Pixels:
            return Pixels(images.make(number), mean, std, augmentation, device, dtype)

        def any_rows(rows: torch.Tensor) -> Pixels:
            return Pixels(images.gather(rows), mean, std, augmentation, device, dtype)

        self._client, self._any_rows = lru_cache(KEPT)(client), any_rows

    def targets_of(self, rows: torch.Tensor) -> torch.Tensor:
        return self._made.gather(rows).labels

    def batch(self, rows: torch.Tensor, draws: torch.Tensor | None) -> Batch:
        each, first = self._made.each, int(rows[0]) // self._made.each
        if bool((rows // each == first).all()):
            return self._client(first).batch(rows - first * each, draws)
        return self._any_rows(rows.cpu()).batch(torch.arange(len(rows), device=self.device), draws)
