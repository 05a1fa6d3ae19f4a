"""Which rows each client trains, validates and tests on. A client is lists of row numbers, nothing more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedspa.data.made import MadeImages
from fedspa.data.source import ImageData, ImageSet, ImageSource
from fedspa.errors import UserError
from fedspa.partition.base import AnyPartition, label_counts
from fedspa.partition.blocks import Blocks
from fedspa.randomness import numpy_generator


@dataclass(frozen=True)
class ClientRows:
    """Sorted int64 rows of each client: `train` and `val` index the train split, `test` the test split."""

    train: Sequence[np.ndarray]
    val: Sequence[np.ndarray]
    test: Sequence[np.ndarray]
    names: tuple[str, ...] = ()
    """What each client stands for in the data, where the partition knows it."""

    def held(self, images: ImageSet | MadeImages) -> Sequence[np.ndarray]:
        """The training rows of each client, its validation rows included."""
        if isinstance(images, MadeImages):
            return OnDemand(images.clients, images.rows, images.each)
        return [np.sort(np.concatenate(parts)) for parts in zip(self.train, self.val, strict=True)]


def client_rows(
    data: ImageData, source: ImageSource, partition: AnyPartition, clients: int, seed: int
) -> ClientRows:
    """The rows of every client: a pure function of the data, the settings and the seed.

    Test rows are the partition's own, where it has some. Else they follow the label shares of the client's training
    rows before its validation rows are taken out, and are drawn for each client on its own, so that two clients may
    share some.
    """
    if isinstance(data.train, MadeImages) or isinstance(data.test, MadeImages):
        return _made_rows(data, source, partition, seed)
    assigned = partition.assign(data, clients, seed)
    held = assigned.train
    counts = label_counts(data.train_labels, held, source.classes)
    test_labels = data.test.labels.numpy()
    test_by_class = [np.flatnonzero(test_labels == label) for label in range(source.classes)]
    available = np.array([len(rows) for rows in test_by_class])

    train_rows, val_rows, test_rows = [], [], []
    for client in range(clients):
        train, val = _hold_out(held[client], source.val_fraction, seed, client)
        train_rows.append(train)
        val_rows.append(val)
        if assigned.test is not None:
            test_rows.append(assigned.test[client])
            continue
        take = _test_counts(counts[client], available, source, client)
        rng = numpy_generator(seed, "client_test", client=client)
        drawn = [rng.choice(test_by_class[c], take[c], replace=False) for c in np.flatnonzero(take)]
        test_rows.append(np.sort(np.concatenate(drawn)))
    return ClientRows(train_rows, val_rows, test_rows, assigned.names)


class OnDemand(Sequence[np.ndarray]):
    """A list of as many clients' rows as there may be, each found when it is asked for."""

    def __init__(self, clients: int, rows: Callable[[int], np.ndarray], each: int) -> None:
        """`rows` gives those of a client; every client has `each` of them."""
        self._clients, self._rows, self.each = range(clients), rows, each

    def __len__(self) -> int:
        return len(self._clients)

    def __getitem__(self, client: Any) -> Any:
        return self._rows(self._clients[client])


def row_counts(held: Sequence[np.ndarray]) -> np.ndarray:
    """How many rows each client holds: int64 [clients]."""
    if isinstance(held, OnDemand):
        return np.full(len(held), held.each, np.int64)
    return np.array([len(rows) for rows in held], np.int64)


def _made_rows(data: ImageData, source: ImageSource, partition: AnyPartition, seed: int) -> ClientRows:
    """Rows of clients whose images are made for them: nothing is dealt, and nothing is held in memory."""
    train, test = data.train, data.test
    assert isinstance(train, MadeImages) and isinstance(test, MadeImages)
    if not isinstance(partition, Blocks):
        raise UserError(
            f"dataset={source.name} makes each client images of its own, which partition={partition.name} cannot "
            "deal to others: it must be partition=blocks."
        )

    val = held_out(train.each, source.val_fraction)

    def kept(part: int, each: int) -> OnDemand:
        return OnDemand(
            train.clients,
            lambda client: _hold_out(train.rows(client), source.val_fraction, seed, client)[part],
            each,
        )

    test_rows = OnDemand(test.clients, test.rows, test.each)
    return ClientRows(kept(0, train.each - val), kept(1, val), test_rows)


def _hold_out(rows: np.ndarray, fraction: float, seed: int, client: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation rows; with a fraction above 0 every client has at least one of each."""
    if fraction == 0:
        return rows, rows[:0]
    if len(rows) < 2:
        raise UserError(
            f"dataset.val_fraction={fraction} needs 2 training images or more in every client, but client "
            f"{client} has {len(rows)}: it must be 0, or fewer clients share the data."
        )
    count = held_out(len(rows), fraction)
    shuffled = numpy_generator(seed, "client_val", client=client).permutation(rows)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def held_out(rows: int, fraction: float) -> int:
    """How many of a client's rows are held out for validation: some and not all, where the fraction is not 0."""
    return min(max(round(fraction * rows), 1), rows - 1) if fraction else 0


def _test_counts(counts: np.ndarray, available: np.ndarray, source: ImageSource, client: int) -> np.ndarray:
    """Test images of each class int [classes] for a client that trains on `counts`."""
    if source.client_test_rounding == "ceil":
        shares = -(-counts * source.client_test_images // counts.sum())
        take = np.minimum(shares, available)
    else:
        take = largest_fitting(counts, source.client_test_images, available)
    if not take.any():
        raise UserError(
            f"client {client} gets no test image: the test set has {available[counts.argmax()]} of class "
            f"{counts.argmax()}, its most frequent one; raise dataset.test_rows."
        )
    return take


def largest_fitting(counts: np.ndarray, total: int, available: np.ndarray) -> np.ndarray:
    """`largest_remainder` of the most images up to `total` that asks no class for more than is available."""
    # Every size is tried: more images in all can mean fewer of one class (the Alabama paradox).
    for size in range(total, 0, -1):
        take = largest_remainder(counts, size)
        if (take <= available).all():
            return take
    return np.zeros_like(counts)


def largest_remainder(counts: np.ndarray, total: int) -> np.ndarray:
    """Share `total` out in proportion to `counts` int [classes], in whole numbers that add up to it.

    Each gets the whole part of its quota, the largest remainders one more; a tie goes to the lower class.
    """
    shares, remainders = np.divmod(counts * total, counts.sum())
    rest = total - shares.sum()
    shares[np.argsort(-remainders, kind="stable")[:rest]] += 1
    return shares
