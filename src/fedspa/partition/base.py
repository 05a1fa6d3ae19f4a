"""The base class of partitions: a pure function from (data, settings, seed) to the rows of clients."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from fedspa.core.errors import UserError
from fedspa.core.limits import Component
from fedspa.core.randomness import numpy_generator

if TYPE_CHECKING:
    from fedspa.data.sets import Data


@dataclass(frozen=True)
class Assignment:
    """The sorted int64 rows of each client."""

    train: list[np.ndarray]
    """Rows of the train split. No row belongs to two clients."""
    test: list[np.ndarray] | None = None
    """Rows of the test split; None: they are drawn with the label shares of the client's training rows."""
    names: tuple[str, ...] = ()
    """The name of each client in the data, such as its writer, if there is one."""


@dataclass(kw_only=True)
class AnyPartition(Component, ABC):
    """Assigns rows to clients."""

    section: ClassVar[str] = "partition"

    @abstractmethod
    def assign(self, data: Data, clients: int, seed: int) -> Assignment:
        """The rows of each of `clients` clients. Raises `UserError` if the data or the settings do not allow it."""

    def described(self) -> Self:
        """A copy with all facts that decide the result, such as the hash of a file. Raises `UserError` without them."""
        return self


@dataclass(kw_only=True)
class Partition(AnyPartition):
    """Gives every training row to exactly one client, by the labels alone."""

    by_label: ClassVar[bool] = True
    """True if the partition depends on the labels. Others can divide the rows of a regression too."""

    def assign(self, data: Data, clients: int, seed: int) -> Assignment:
        targets = data.train.targets  # type: ignore[union-attr]
        if targets.is_floating_point():
            if self.by_label:
                raise UserError(
                    f"partition={self.name} deals by the classes of the rows, but the targets of this data set are "
                    "numbers: use partition=iid, or partition=column with a column of the data."
                )
            targets = targets.new_zeros(len(targets)).long()
        return Assignment(self.split(targets.numpy(), clients, numpy_generator(seed, "partition")))

    @abstractmethod
    def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Sequence[np.ndarray]:
        """The rows of each client, in any order. `labels`: int64 [N]. Raises `UserError` if it is impossible."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """The rows of `deal`, sorted and checked: every row occurs once, and no client is empty."""
        if clients > len(labels):
            raise UserError(
                f"federation.clients={clients} cannot share {len(labels)} training rows: every client needs at "
                f"least one, so it must be at most {len(labels)}."
            )
        rows = [np.sort(np.asarray(part, dtype=np.int64)) for part in self.deal(labels, clients, rng)]
        if len(rows) != clients or not np.array_equal(np.sort(np.concatenate(rows)), np.arange(len(labels))):
            raise ValueError(f"partition {self.name} did not deal every row to one of {clients} clients")
        empty = [client for client, part in enumerate(rows) if len(part) == 0]
        if empty:
            raise UserError(
                f"partition={self.name} leaves {len(empty)} of federation.clients={clients} without rows "
                f"(N/K = {len(labels) / clients:.1f}): fewer clients or more rows would do."
            )
        return rows


def deal_classes(
    labels: np.ndarray, values: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Random rows of each class for each client.

    values: int [classes], the labels that occur. counts: int [clients, classes]; each column adds up to the
    number of rows of that class.
    """
    rows: list[list[np.ndarray]] = [[] for _ in counts]
    for column, value in enumerate(values):
        shuffled = rng.permutation(np.flatnonzero(labels == value))
        for client, part in enumerate(np.split(shuffled, np.cumsum(counts[:-1, column]))):
            rows[client].append(part)
    return [np.concatenate(parts) for parts in rows]


def label_counts(labels: np.ndarray, rows: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """The number of rows of each class at each client: int64 [clients, classes]."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in rows])


def partition_hash(rows: Sequence[np.ndarray]) -> str:
    """A hash of 16 hex digits. Two partitions share it only if every client has the same rows."""
    digest = hashlib.sha256()
    for part in rows:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
    return digest.hexdigest()[:16]
