"""The rows that each client trains, validates and tests on. A client is only lists of row numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedspa.core.errors import UserError
from fedspa.core.randomness import numpy_generator
from fedspa.data.sets import ArraySet, Data, MadeImages, held_out_count
from fedspa.data.source import Source
from fedspa.partition.base import AnyPartition, label_counts
from fedspa.partition.blocks import Blocks
from fedspa.partition.client_tests import test_counts


@dataclass(frozen=True)
class ClientRows:
    """The sorted int64 rows of each client: `train` and `val` index the train split, `test` the test split."""

    train: Sequence[np.ndarray]
    val: Sequence[np.ndarray]
    test: Sequence[np.ndarray]
    names: tuple[str, ...] = ()
    """The name of each client in the data, if the partition has names."""
    public: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """The sorted int64 rows of the train split that are public, and no client's."""
    asked: int | None = None
    """The wanted number of test examples for each client; None if the partition gives clients their own."""

    def held(self, images: ArraySet | MadeImages) -> Sequence[np.ndarray]:
        """The training rows of each client, with its validation rows."""
        if isinstance(images, MadeImages):
            return OnDemand(images.clients, images.rows, images.each)
        return [np.sort(np.concatenate(parts)) for parts in zip(self.train, self.val, strict=True)]


def client_rows(data: Data, source: Source, partition: AnyPartition, clients: int, seed: int) -> ClientRows:
    """The rows of every client: a pure function of the data, the settings and the seed.

    If the partition has test rows, they are used. Else they follow the label shares of the client's training
    rows with its validation rows, and are drawn for each client separately, so that two clients may
    share some.
    """
    if isinstance(data.train, MadeImages) or isinstance(data.test, MadeImages):
        return _made_rows(data, source, partition, seed)
    assigned = partition.assign(data, clients, seed)
    held = assigned.train
    kept = [_hold_out(rows, source, "val", seed, client) for client, rows in enumerate(held)]
    shared = [_hold_out(rows, source, "public", seed, client) for client, (rows, _) in enumerate(kept)]
    train_rows, val_rows = [train for train, _ in shared], [val for _, val in kept]
    public = np.sort(np.concatenate([rows for _, rows in shared]))
    if assigned.test is not None:
        return ClientRows(train_rows, val_rows, assigned.test, assigned.names, public)

    # The targets of a regression count as one class: every client is tested on rows drawn from all.
    train_labels, test_labels = (
        np.zeros(len(part), np.int64) if source.is_regression else part.targets.numpy()
        for part in (data.train, data.test)
    )
    classes = source.classes or 1
    counts = label_counts(train_labels, held, classes)
    test_by_class = [np.flatnonzero(test_labels == label) for label in range(classes)]
    available = np.array([len(rows) for rows in test_by_class])
    test_rows = []
    for client, take in enumerate(test_counts(counts, available, source, data.class_names)):
        rng = numpy_generator(seed, "client_test", client=client)
        drawn = [rng.choice(test_by_class[c], take[c], replace=False) for c in np.flatnonzero(take)]
        test_rows.append(np.sort(np.concatenate(drawn)))
    return ClientRows(train_rows, val_rows, test_rows, assigned.names, public, source.client_test_images)


class OnDemand(Sequence[np.ndarray]):
    """A list of the rows of any number of clients. The rows are computed on access."""

    def __init__(self, clients: int, rows: Callable[[int], np.ndarray], each: int) -> None:
        """`rows` returns those of a client; every client has `each` of them."""
        self._clients, self._rows, self.each = range(clients), rows, each

    def __len__(self) -> int:
        return len(self._clients)

    def __getitem__(self, client: Any) -> Any:
        return self._rows(self._clients[client])


def row_counts(held: Sequence[np.ndarray]) -> np.ndarray:
    """The number of rows of each client: int64 [clients]."""
    if isinstance(held, OnDemand):
        return np.full(len(held), held.each, np.int64)
    return np.array([len(rows) for rows in held], np.int64)


def _made_rows(data: Data, source: Source, partition: AnyPartition, seed: int) -> ClientRows:
    """The rows of clients whose images are made on demand. Nothing is divided, and nothing is in memory."""
    train, test = data.train, data.test
    assert isinstance(train, MadeImages) and isinstance(test, MadeImages)
    if not isinstance(partition, Blocks):
        raise UserError(
            f"dataset={source.name} makes each client images of its own, which partition={partition.name} cannot "
            "deal to others: it must be partition=blocks."
        )
    if source.public_fraction:
        raise UserError(
            f"dataset.public_fraction={source.public_fraction} needs images in memory, but dataset={source.name} makes "
            "those of a client when it is trained: it must be 0."
        )

    val = held_out_count(train.each, source.val_fraction)

    def kept(part: int, each: int) -> OnDemand:
        return OnDemand(
            train.clients,
            lambda client: _hold_out(train.rows(client), source, "val", seed, client)[part],
            each,
        )

    test_rows = OnDemand(test.clients, test.rows, test.each)
    return ClientRows(kept(0, train.each - val), kept(1, val), test_rows, asked=test.each)


def _hold_out(
    rows: np.ndarray, source: Source, use: str, seed: int, client: int
) -> tuple[np.ndarray, np.ndarray]:
    """The training rows, and those for another use (val or public). A fraction above 0 leaves at least one of each."""
    fraction = source.val_fraction if use == "val" else source.public_fraction
    if fraction == 0:
        return rows, rows[:0]
    if len(rows) < 2:
        raise UserError(
            f"dataset.{use}_fraction={fraction} needs 2 training rows or more in every client, but client "
            f"{client} has {len(rows)}: it must be 0, or fewer clients share the data."
        )
    count = held_out_count(len(rows), fraction)
    shuffled = numpy_generator(seed, f"client_{use}", client=client).permutation(rows)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])
