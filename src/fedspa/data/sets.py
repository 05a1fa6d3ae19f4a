"""Examples in memory, or made on demand, and the data set that they form."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

ROWS_HASHED = 1024
"""Examples hashed at once: in one memory layout, and without a copy of all."""


@dataclass(frozen=True)
class ArraySet:
    """Inputs and targets of N examples, on the CPU."""

    inputs: torch.Tensor
    """Images uint8 [N, C, H, W], features float32 [N, F], or tokens int64 [N, L]."""
    targets: torch.Tensor
    """Classes int64 [N], or numbers float32 [N, K]."""
    groups: np.ndarray | None = None
    """The value by which natural partitions deal, such as the writer: str [N]. None if the source has none."""

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class MadeImages:
    """Images that are made when a client needs them: a federation of any number of clients.

    Rows are numbered as in a set in memory: client k has `each` rows from k * each on.
    """

    make: Callable[[int], ArraySet]
    """The images of a client, uint8 [each, *shape]: a pure function of its number."""
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
        """The number of images of each class at each client, int64 [clients, classes]. All images are made."""
        counts = [torch.bincount(self.make(k).targets, minlength=classes) for k in range(self.clients)]
        return torch.stack(counts).numpy()

    def gather(self, rows: torch.Tensor) -> ArraySet:
        """The images and labels of any rows (int64 [n] on the CPU)."""
        clients, number = torch.unique(rows // self.each, return_inverse=True)
        sets = [self.make(int(client)) for client in clients]
        local = number * self.each + rows % self.each
        return ArraySet(
            torch.cat([made.inputs for made in sets])[local],
            torch.cat([made.targets for made in sets])[local],
        )


@dataclass(frozen=True)
class Data:
    """A training and a test set. Clients are lists of row numbers into them, never copies."""

    train: ArraySet | MadeImages
    test: ArraySet | MadeImages
    class_names: tuple[str, ...] = ()
    """In the order of the labels; empty if the source has no names."""

    @cached_property
    def hash(self) -> str:
        """16 hex digits of all inputs and targets in their order; "" of images that are made on demand."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.train, self.test):
            if isinstance(part, MadeImages):
                return ""
            digest.update(f"{list(part.inputs.shape)}".encode())
            digest.update(_bytes(part.targets))
            images = part.inputs.dtype == torch.uint8 and part.inputs.ndim == 4
            for piece in part.inputs.split(ROWS_HASHED):
                digest.update(_bytes(piece.permute(0, 2, 3, 1) if images else piece))
        return digest.hexdigest()


def held_out_count(rows: int, fraction: float) -> int:
    """The number of rows that are kept apart: at least one and not all, unless the fraction is 0."""
    return min(max(round(fraction * rows), 1), rows - 1) if fraction else 0


def _bytes(tensor: torch.Tensor) -> bytes:
    array = tensor.numpy()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()
