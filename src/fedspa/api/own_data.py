"""Data that a user passes as arrays, and the rows of its clients."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedspa.api.own_arrays import array_set, as_array, check_alike
from fedspa.core.errors import UserError, check_range
from fedspa.core.randomness import numpy_generator
from fedspa.data.sets import ArraySet, Data, held_out_count
from fedspa.data.source import Source
from fedspa.partition.base import AnyPartition, Assignment, partition_hash

log = logging.getLogger(__name__)

TEST_FRACTION = 0.2


@dataclass(kw_only=True)
class OwnData(Source):
    """A training and a test set that are already in memory."""

    train: ArraySet
    test: ArraySet

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.inputs.shape[1:])

    @property
    def input_dtype(self) -> torch.dtype | None:
        return torch.int64 if self.train.inputs.dtype == torch.int64 else None

    @property
    def outputs(self) -> int:
        return self.train.targets.shape[1] if self.is_regression else self.classes

    @property
    def is_regression(self) -> bool:
        return self.train.targets.is_floating_point()

    @property
    def node(self) -> dict[str, Any]:
        """The config's record of the data."""
        shown = {
            name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            for name, tensor in (("inputs", self.train.inputs), ("targets", self.train.targets))
        }
        return {
            "name": self.name,
            **shown,
            "test_size": len(self.test),
            "hash": Data(self.train, self.test).hash,
            "val_fraction": self.val_fraction,
            "public_fraction": self.public_fraction,
        }

    @property
    def model_facts(self) -> dict[str, Any]:
        """The facts for a model of the config; for square images also their channels and size."""
        facts = super().model_facts
        if len(self.input_shape) == 3 and self.input_shape[1] == self.input_shape[2]:
            facts |= {"channels": self.input_shape[0], "image_size": self.input_shape[1]}
        return facts

    def read(self, split: str) -> ArraySet:
        return self.train if split == "train" else self.test


@dataclass(kw_only=True)
class OwnRows(AnyPartition):
    """The rows of each client, as the user gave them."""

    assignment: Assignment

    @property
    def clients(self) -> int:
        return len(self.assignment.train)

    @property
    def node(self) -> dict[str, Any]:
        """The config's record of the rows."""
        train, test = (partition_hash(rows) for rows in (self.assignment.train, self.assignment.test or []))
        return {"name": self.name, "hash": train, "test_hash": test}

    def assign(self, data: Data, clients: int, seed: int) -> Assignment:
        if clients != self.clients:
            raise UserError(
                f"federation.clients={clients} is not the number of clients in the data, {self.clients}."
            )
        return self.assignment


def own_data(
    data: tuple[Any, Any],
    clients: Any,
    test: tuple[Any, Any] | None,
    test_clients: Any,
    test_fraction: float | None,
    **fractions: Any,
) -> tuple[OwnData, OwnRows]:
    """The data and rows of a run, from arguments of `fedspa.Federation`. Raises `UserError`.

    fractions: the shares of each client's rows for validation and public rows, as for `Source`.
    """
    train_set = array_set("data", data)
    if clients is None:
        raise UserError(
            "clients is missing: the client of each row of data, or a list of each client's rows."
        )
    train, names = _rows("clients", clients, len(train_set))
    if (used := sum(map(len, train))) < len(train_set):
        log.warning("clients holds %d of the %d rows of data; the others are not used.", used, len(train_set))
    if test is None:
        if test_clients is not None:
            raise UserError("test_clients is about test=(inputs, targets), which is missing.")
        test_set = train_set
        fraction = TEST_FRACTION if test_fraction is None else test_fraction
        check_range("test_fraction", fraction, low=0, high=1, low_open=True, high_open=True)
        train, held_out = _held_out(train, names, fraction)
    else:
        if test_fraction is not None:
            raise UserError("test_fraction holds out test rows of data, but test has them: leave one out.")
        test_set = array_set("test", test)
        check_alike(train_set, test_set)
        held_out = [np.arange(len(test_set))] * len(train)
        if test_clients is not None:
            held_out = _test_rows(test_clients, names, len(train), len(test_set))
    classes = 0
    if not train_set.targets.is_floating_point():
        classes = 1 + max(int(part.targets.max()) for part in (train_set, test_set))
        if classes < 2:
            raise UserError(
                "data has one class only, 0: two or more are needed (floats as targets are numbers)."
            )
    source = OwnData(
        name="arrays", classes=classes, train_size=len(train_set), test_size=len(test_set), train=train_set,
        test=test_set, **fractions,
    )  # fmt: skip
    return source, OwnRows(name="own", assignment=Assignment(train, held_out, tuple(map(str, names))))


def _rows(where: str, given: Any, count: int) -> tuple[list[np.ndarray], list[Any]]:
    """The sorted int64 rows of each client, and the clients' names.

    Args:
        given: a client for each of `count` rows, or a list of each client's rows.
    """
    if not _is_list_of_rows(given):
        ids = as_array(where, given)
        if ids.shape != (count,):
            raise UserError(
                f"{where} has shape {list(ids.shape)}, but there are {count} rows: it must name the client of each."
            )
        if ids.dtype.kind == "f" and not np.isfinite(ids).all():
            raise UserError(
                f"{where} has no client (NaN) in row {int(np.flatnonzero(~np.isfinite(ids))[0])}."
            )
        try:
            names, number = np.unique(ids, return_inverse=True)
        except TypeError as error:  # None, or objects that have no order
            raise UserError(f"{where} must name the client of each row by a number or a text.") from error
        order = np.argsort(number, kind="stable")
        return np.split(order, np.cumsum(np.bincount(number))[:-1]), names.tolist()
    rows = [as_array(where, part) for part in given]
    for client, part in enumerate(rows):
        if part.ndim == 1 and not len(part):
            raise UserError(f"{where}: client {client} has no rows.")
        if part.ndim != 1 or part.dtype.kind not in "iu" or part.min() < 0 or part.max() >= count:
            raise UserError(
                f"{where}: the rows of client {client} must be whole numbers from 0 to {count - 1}, one list of them."
            )
    together = np.concatenate(rows)
    if where == "clients" and len(twice := np.flatnonzero(np.bincount(together) > 1)):
        raise UserError(f"{where}: row {twice[0]} is given more than once: a row belongs to one client.")
    return [np.sort(part.astype(np.int64)) for part in rows], list(range(len(rows)))


def _is_list_of_rows(given: Any) -> bool:
    return (
        isinstance(given, list | tuple)
        and len(given) > 0
        and all(
            isinstance(part, Sequence | np.ndarray | torch.Tensor) and not isinstance(part, str)
            for part in given
        )
    )


def _test_rows(given: Any, names: list[Any], clients: int, count: int) -> list[np.ndarray]:
    """The test rows of each training client."""
    rows, found = _rows("test_clients", given, count)
    if _is_list_of_rows(given):
        if len(rows) != clients:
            raise UserError(f"test_clients has rows of {len(rows)} clients, but clients has {clients}.")
        return rows
    by_name = dict(zip(found, rows, strict=True))
    if missing := [name for name in names if name not in by_name]:
        raise UserError(f"test_clients has no row of client {missing[0]!r}: each client needs one at least.")
    if unknown := [name for name in found if name not in set(names)]:
        raise UserError(f"test_clients has client {unknown[0]!r}, who has no training rows in clients.")
    return [by_name[name] for name in names]


def _held_out(
    rows: list[np.ndarray], names: list[Any], fraction: float
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The training and test rows of each client, the same for every seed. Each client has at least one of both."""
    train, test = [], []
    for client, part in enumerate(rows):
        if len(part) < 2:
            raise UserError(
                f"client {names[client]!r} has one row, of which no test row can be held out: give it more, or give "
                "test=(inputs, targets)."
            )
        count = held_out_count(len(part), fraction)
        shuffled = numpy_generator(0, "held_out_test", client=client).permutation(part)
        test.append(np.sort(shuffled[:count]))
        train.append(np.sort(shuffled[count:]))
    return train, test
