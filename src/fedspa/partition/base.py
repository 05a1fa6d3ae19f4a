"""What every partition is: a pure function from (data, settings, seed) to rows of clients."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from fedspa.core.errors import UserError
from fedspa.core.randomness import numpy_generator

if TYPE_CHECKING:
    from fedspa.data.source import ImageData


@dataclass(frozen=True)
class Assignment:
    """Sorted int64 rows of each client."""

    train: list[np.ndarray]
    """Of the train split; no row is two clients'."""
    test: list[np.ndarray] | None = None
    """Of the test split; None: to be drawn with the label shares of the client's training rows."""
    names: tuple[str, ...] = ()
    """What each client stands for, where it is something of the data, such as a writer."""


@dataclass(kw_only=True)
class AnyPartition(ABC):
    """Assigns rows to clients, whatever it goes by."""

    name: str

    @abstractmethod
    def assign(self, data: ImageData, clients: int, seed: int) -> Assignment:
        """The rows of each of `clients` clients. Raises `UserError` where the data or the settings do not allow it."""

    def described(self) -> Self:
        """The same with all that decides its results; of a file, what is in it. Raises `UserError` without it."""
        return self


@dataclass(kw_only=True)
class Partition(AnyPartition):
    """Deals every training row to exactly one client, by the labels alone."""

    def assign(self, data: ImageData, clients: int, seed: int) -> Assignment:
        return Assignment(self.split(data.train_labels, clients, numpy_generator(seed, "partition")))

    @abstractmethod
    def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Sequence[np.ndarray]:
        """The rows of each client, in any order. labels: int64 [N]. Raises `UserError` where it cannot."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """`deal`, sorted and checked: every row once, nobody without rows."""
        if clients > len(labels):
            raise UserError(
                f"federation.clients={clients} cannot share {len(labels)} training images: every client needs at "
                f"least one, so it must be at most {len(labels)}."
            )
        rows = [np.sort(np.asarray(part, dtype=np.int64)) for part in self.deal(labels, clients, rng)]
        if len(rows) != clients or not np.array_equal(np.sort(np.concatenate(rows)), np.arange(len(labels))):
            raise ValueError(f"partition {self.name} did not deal every row to one of {clients} clients")
        empty = [client for client, part in enumerate(rows) if len(part) == 0]
        if empty:
            raise UserError(
                f"partition={self.name} leaves {len(empty)} of federation.clients={clients} without images "
                f"(N/K = {len(labels) / clients:.1f}): fewer clients or more images would do."
            )
        return rows


def deal_classes(
    labels: np.ndarray, values: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Random rows of each class for each client.

    values: int [classes], the labels that occur. counts: int [clients, classes], columns adding up to the
    number of rows of that class.
    """
    rows: list[list[np.ndarray]] = [[] for _ in counts]
    for column, value in enumerate(values):
        shuffled = rng.permutation(np.flatnonzero(labels == value))
        for client, part in enumerate(np.split(shuffled, np.cumsum(counts[:-1, column]))):
            rows[client].append(part)
    return [np.concatenate(parts) for parts in rows]


def label_counts(labels: np.ndarray, rows: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """int64 [clients, classes]: how many rows of each class every client holds."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in rows])


def partition_hash(rows: Sequence[np.ndarray]) -> str:
    """16 hex digits that two partitions share only if every client holds the same rows."""
    digest = hashlib.sha256()
    for part in rows:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
    return digest.hexdigest()[:16]
