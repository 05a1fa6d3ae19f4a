"""Rows of a split: their values by column, the classes of a column of labels, and the words of error sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import datasets
import numpy as np

from fedspa.core.errors import UserError, nearest
from fedspa.data.files import spelled

FRACTIONS = ("float", "double", "decimal")
NUMBERS = ("int", "uint", *FRACTIONS)
"""The beginnings of the types of columns of numbers."""
DISCRETE = ("int", "uint", "bool", "string", "large_string")
"""The beginnings of the types of columns that can hold labels or groups."""
MOST_NAMED = 6
"""Columns that a sentence names."""
KEYS = "column of whole numbers or names"
UNKNOWN = (
    "no class of the training examples (a split without labels?): set dataset.test_split to another one, or to none to "
    "hold out a share; labels are names, or numbers from 0"
)


class Part(NamedTuple):
    """Rows int64 [n] of a split."""

    data: datasets.Dataset
    rows: np.ndarray
    where: str
    """The split in words, for sentences: "dataset.name=org/name, split train"."""

    def of(self, rows: np.ndarray) -> Part:
        """Other rows of the split."""
        return self._replace(rows=rows)

    def cells(self, column: str) -> list[Any]:
        """The plain values of a column."""
        return self.data.select_columns([column]).with_format("arrow")[self.rows].column(0).to_pylist()

    def values(self, column: str) -> np.ndarray:
        """A column of whole numbers or names: int or str [n], as objects. Raises `UserError` for a missing value."""
        values = self.cells(column)
        if None in values:
            raise UserError(f"{self.place(values.index(None))}: the column {column} is empty there.")
        return np.array([value if isinstance(value, str) else int(value) for value in values], dtype=object)

    def names(self, column: str) -> list[str] | None:
        """The names of the classes of a column of class labels; None for another column."""
        return getattr(self.data.features[column], "names", None)

    def place(self, index: int) -> str:
        """The place of a row, for sentences; `index` counts over `rows`."""
        path, row = "", int(self.rows[index])
        for name in self.columns_of(datasets.Image):
            path = (self.of(self.rows[[index]]).cells(name)[0] or {}).get("path") or path
        return f"{self.where}, row {row} (from 0)" + (f", {spelled(path)}" if path else "")

    def columns_of(self, kind: Any, types: tuple[str, ...] = ("",)) -> list[str]:
        """The columns of a kind of `datasets` whose types begin so."""
        features = self.data.features.items()
        return [n for n, found in features if isinstance(found, kind) and found.dtype.startswith(types)]

    @property
    def discrete(self) -> list[str]:
        """The columns of whole numbers, names and class labels."""
        return self.columns_of(datasets.Value | datasets.ClassLabel, DISCRETE)

    @property
    def numeric(self) -> list[str]:
        return self.columns_of(datasets.Value, NUMBERS)

    def column(self, setting: str, name: str | None, valid: Sequence[str], what: str) -> str:
        """The column that a setting names. If it names none, the only valid one.

        what: such a column in words. Raises `UserError` with the nearest valid name.
        """
        if name in valid or (name is None and len(valid) == 1):
            return name or valid[0]
        if name is None:
            fault = "more than one column that could be meant" if valid else f"no {what}"
            able = list(valid or self.discrete)
            others = " or ".join(able[:MOST_NAMED]) or "a column, of which there is none"
            more = f" or another of {len(able)}" if len(able) > MOST_NAMED else ""
            raise UserError(f"{self.where} has {fault}: set {setting} to {others}{more}.")
        kind = self.data.features.get(name)
        fault = f"no {what} of" if kind else "no column of"
        held = f" (it holds {getattr(kind, 'dtype', type(kind).__name__)})" if kind else ""
        raise UserError(f"{setting}={name} is {fault} {self.where}{held}: {nearest(name, valid)}.")


@dataclass(frozen=True)
class Labels:
    """The classes of a column of labels."""

    column: str
    numbers: dict[Any, int]
    """The number of each label, counted from 0."""
    names: tuple[str, ...] = ()
    """The names of the classes, in the order of their numbers."""
    fault: str = UNKNOWN
    """The end of the sentence about a label without a number."""

    @classmethod
    def of(cls, train: Part, column: str) -> Labels:
        """The classes of a training split: those that a column of class labels names, else its values in order.

        A label below 0 stands for an unknown one, and is no class.
        """
        names = train.names(column)
        values = range(len(names)) if names else sorted(set(train.values(column)))
        known = [value for value in values if isinstance(value, str) or value >= 0]
        return cls(column, {value: i for i, value in enumerate(known)}, tuple(names or map(str, known)))

    def numbered(self, part: Part) -> np.ndarray:
        """The classes int64 [n] of rows. Raises `UserError` for a label that is no class."""
        labels = part.values(part.column("dataset.label", self.column, part.discrete, KEYS))
        numbers = np.array([self.numbers.get(label, -1) for label in labels], dtype=np.int64)
        for index in np.flatnonzero(numbers < 0)[:1]:
            raise UserError(f"{part.place(index)}: the label {labels[index]} is {self.fault}.")
        return numbers
