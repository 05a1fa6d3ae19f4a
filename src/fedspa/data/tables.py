"""Data in tables, of the hub or of files. A source reads its facts from the data where the config leaves them open.

The config hash, costs and models need the facts before the data. So a run first has its source `described`, and its
config.yaml records what was found. A source whose facts are all stated is not described again: the data is checked.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import datasets
import numpy as np

from fedspa.core.errors import UserError, check_range, nearest
from fedspa.core.randomness import numpy_generator
from fedspa.data import files, hub
from fedspa.data.sets import ArraySet, Data
from fedspa.data.source import Source

HELD_OUT = "none"
"""The test split of a data set that has none, or whose own is not to be used."""
TEST_SPLITS = ("test", "validation", "valid", "val", "dev")
"""The first of these that a data set has is taken for its test split."""
DISCRETE = ("int", "uint", "bool", "string", "large_string")
"""The types of columns that can hold labels or groups begin so."""
KEYS = "column of whole numbers or names"

_described: dict[str, Any] = {}
_opened: dict[str, Mapping[str, datasets.Dataset]] = {}


class Part(NamedTuple):
    """Rows int64 [n] of a split."""

    data: datasets.Dataset
    rows: np.ndarray
    where: str
    """The split in words, for sentences: "dataset.name=org/name, split train"."""

    def of(self, rows: np.ndarray) -> Part:
        return self._replace(rows=rows)

    def cells(self, column: str) -> list[Any]:
        """The plain values of a column."""
        return self.data.select_columns([column]).with_format("arrow")[self.rows].column(0).to_pylist()

    def values(self, column: str) -> np.ndarray:
        """A column of whole numbers (int64) or names (str, as objects). Raises `UserError` where a value is missing."""
        values = self.cells(column)
        if None in values:
            raise UserError(f"{self.place(values.index(None))}: the column {column} is empty there.")
        names = bool(values) and isinstance(values[0], str)
        return np.array(values, dtype=object) if names else np.array(values).astype(np.int64)

    def place(self, index: int) -> str:
        """Where a row lies, for sentences; `index` counts over `rows`."""
        path, row = "", int(self.rows[index])
        for name in columns_of(self.data, datasets.Image):
            path = (self.of(self.rows[[index]]).cells(name)[0] or {}).get("path") or path
        return f"{self.where}, row {row} (from 0)" + (f", {files.spelled(path)}" if path else "")

    def column(self, setting: str, name: str | None, valid: Sequence[str], what: str) -> str:
        """The column that a setting names or, where it names none, the only valid one.

        what: such a column in words. Raises `UserError` with the nearest valid name.
        """
        if name in valid or (name is None and len(valid) == 1):
            return name or valid[0]
        if name is None:
            fault = "more than one that could be meant" if valid else f"no {what}"
            others = " or ".join(valid or discrete(self.data)) or "a column, of which there is none"
            raise UserError(f"{self.where} has {fault}: set {setting} to {others}.")
        kind = self.data.features.get(name)
        fault = f"no {what} of" if kind else "no column of"
        held = f" (it holds {getattr(kind, 'dtype', type(kind).__name__)})" if kind else ""
        raise UserError(f"{setting}={name} is {fault} {self.where}{held}: {nearest(name, valid)}.")


def columns_of(data: datasets.Dataset, kind: type) -> list[str]:
    """The columns of a type of `datasets`."""
    return [name for name, found in data.features.items() if isinstance(found, kind)]


def discrete(data: datasets.Dataset) -> list[str]:
    """The columns of whole numbers, names and class labels."""
    return [
        name
        for name, kind in data.features.items()
        if isinstance(kind, datasets.Value | datasets.ClassLabel) and kind.dtype.startswith(DISCRETE)
    ]


@dataclass(kw_only=True)
class TableSource(Source):
    """Examples in one table a split."""

    # Facts: 0 stands for "read from the data".
    classes: int = 0
    train_size: int = 0
    test_size: int = 0

    path: str | None = None
    """A folder of files, one file, or an archive."""
    fingerprint: str = ""
    """A hash over the names and sizes of all files, read from `path`. A new hash means another data set."""
    hub: str | None = None
    """Without a path: the data set's name on the Hugging Face hub, organisation/name."""
    subset: str | None = None
    """The hub's "config" or "subset" of a data set that has several; null: the only one, or the default."""
    revision: str | None = None
    """A branch, a tag or a commit of the hub; null: the newest. A run records the commit."""
    label: Any = None
    """The column of the labels, whole numbers or names; null: the only one of class labels, or the names of folders."""
    train_split: str = "train"
    test_split: str | None = None
    """null: test or validation, whichever there is; none: a share of the training split is held out."""
    test_fraction: float = 0.2
    """That share, taken from each class, or from each group where there is a `group_by`."""
    group_by: str | None = None
    """A column, such as the writer, that natural partitions go by; null: the one that partition.column names."""
    data_seed: int = 0
    """Chooses the held-out share and the `train_rows`. It is not the run's seed: all seeds share one data set."""

    def __post_init__(self) -> None:
        check_range("dataset.test_fraction", self.test_fraction, low=0, high=1, low_open=True, high_open=True)
        check_range("dataset.data_seed", self.data_seed, low=0)
        self.check_settings()
        if self.is_described:
            self.check_facts()

    @property
    def is_described(self) -> bool:
        """True if nothing has to be read from the data."""
        return bool(self.train_size and self.test_size and self.test_split)

    @property
    def origin(self) -> str:
        """The setting that says where the data comes from, for error sentences."""
        if self.path:
            return f"dataset.path={self.path}"
        return f"dataset.{'name' if self.hub == self.name else 'hub'}={self.hub}"

    def described(self, group_by: str | None) -> Self:
        if self.group_by and group_by and self.group_by != group_by:
            raise UserError(
                f"dataset.group_by={self.group_by} and partition.column={group_by} differ: leave dataset.group_by out."
            )
        wanted = replace(self, group_by=self.group_by or group_by).pinned()
        if group_by and not self.group_by:
            train = wanted._split("train_split", self.train_split)
            train.column("partition.column", group_by, discrete(train.data), KEYS)
            if group_by not in (test := wanted._part("test")).data.column_names:
                raise UserError(
                    f"partition.column={group_by} is no column of {test.where}: dataset.test_split=none holds out a "
                    "share of each client's own training examples instead."
                )
        if wanted.is_described:
            return wanted
        key = json.dumps([type(self).__name__, asdict(wanted)], sort_keys=True)
        if key not in _described:
            _described[key] = wanted._with_facts()
        return _described[key]

    def pinned(self) -> Self:
        """The same source with its version; nobody is asked for a version that is stated already."""
        if self.path:
            now = files.fingerprint(self.path, self.origin)
            if self.fingerprint and now != self.fingerprint:
                raise UserError(
                    f"{self.origin} holds other files than those that dataset.fingerprint={self.fingerprint} was taken "
                    f"from: theirs is {now}; leave it out to take the data as it is."
                )
            return replace(self, fingerprint=now)
        if self.fingerprint:  # a recorded config, read where the files are not
            return self
        if not self.hub:
            raise UserError(
                "dataset.path=<file or folder> is missing (of the hub: dataset=hub dataset.name=<organisation/name>)."
            )
        if self.subset and hub.COMMIT.fullmatch(self.revision or ""):
            return self
        commit = hub.commit_of(self.hub, self.revision, self.origin)
        return replace(
            self, revision=commit, subset=hub.builder(self.hub, self.subset, commit, self.origin).config.name
        )

    def _with_facts(self) -> Self:
        """The same with all facts; those that are given must be right."""
        return self._agreed(self._facts())

    def _agreed(self, found: Mapping[str, Any]) -> Self:
        for name, value in found.items():
            if (given := getattr(self, name)) and given != value:
                raise UserError(f"dataset.{name}={given} is not so: {self.origin} has {value}; leave it out.")
        return replace(self, **found)

    def _facts(self) -> dict[str, Any]:
        """Facts that the data says of itself, by the names of fields."""
        if not self.is_regression and len(self._classes) == 1:
            raise UserError(
                f"{self.origin} has one class only, {self._names[0]}: two or more are needed, each with a folder of "
                "its own, or dataset.label names the column of the labels."
            )
        parts = [self._part(split) for split in ("train", "test")]
        for part in parts:
            self._groups(part)
            if not self.is_regression:
                self._numbered(part)
        classes = 0 if self.is_regression else len(self._classes)
        train, test = map(self._count, parts)
        return {"classes": classes, "train_size": train, "test_size": test, "test_split": self._test_split}

    # ---- the splits

    def open(self) -> Mapping[str, datasets.Dataset]:
        """The splits by name. Raises `UserError` where there are none to be had."""
        if self.path:
            return files.open_tables(self.path, self.origin, self._split_names)
        assert self.hub is not None
        commit = hub.commit_of(self.hub, self.revision, self.origin)
        return hub.open_tables(self.hub, self.subset, commit, self.origin)

    @property
    def _split_names(self) -> list[str]:
        """Names that may be those of splits, that of the training split first."""
        return list(dict.fromkeys([self.train_split, *filter(None, [self.test_split]), *TEST_SPLITS]))

    @cached_property
    def _tables(self) -> Mapping[str, datasets.Dataset]:
        """A known version is opened once in a process: a run describes its data, then reads it."""
        if not (self.fingerprint or self.revision):
            return self.open()
        version = [self.path, self.fingerprint, self.hub, self.subset, self.revision, self.label]
        key = json.dumps([type(self).__name__, version, self._split_names])
        if key not in _opened:
            _opened[key] = self.open()
        return _opened[key]

    @cached_property
    def _test_split(self) -> str:
        others = (name for name in TEST_SPLITS if name in self._tables and name != self.train_split)
        return self.test_split or next(others, HELD_OUT)

    def _split(self, setting: str, name: str, *further: str) -> Part:
        """All rows of a split. Raises `UserError` where there is no such split; `further` names are valid too."""
        if name not in self._tables:
            valid = [*self._tables, *further]
            raise UserError(f"dataset.{setting}={name} is no split of {self.origin}: {nearest(name, valid)}.")
        data = self._tables[name]
        return Part(data, np.arange(len(data)), f"{self.origin}, split {name}")

    @cached_property
    def _held_out(self) -> np.ndarray:
        """bool [N]: the rows of the training split that are the test split's."""
        whole = self._split("train_split", self.train_split)
        strata = self._groups(whole)
        if strata is None:
            strata = np.zeros(len(whole.rows)) if self.is_regression else self._labels(whole)
        return held_out(strata, self.test_fraction, self.data_seed)

    def _part(self, split: str) -> Part:
        """All rows of "train" or "test", whatever row limits there are."""
        if split == "test" and self._test_split != HELD_OUT:
            part = self._split("test_split", self._test_split, HELD_OUT)
        else:
            part = self._split("train_split", self.train_split)
            if self._test_split == HELD_OUT:
                part = part.of(np.flatnonzero(self._held_out if split == "test" else ~self._held_out))
        if not len(part.rows):
            raise UserError(f"{self.origin} has no {split} {self.things}: there are too few.")
        return part

    def _groups(self, part: Part) -> np.ndarray | None:
        """The value of the group column in each row, str [n]; None without one, or where this split has none."""
        column = self.group_by
        if column is None or (
            column not in part.data.features and not part.where.endswith(f" {self.train_split}")
        ):
            return None
        part.column("dataset.group_by", column, discrete(part.data), KEYS)
        names, values = getattr(part.data.features[column], "names", None), part.values(column)
        return np.array([names[value] if names else str(value) for value in values], dtype=object)

    # ---- labels

    def _label_column(self, part: Part) -> str:
        if self.label:
            return part.column("dataset.label", self.label, discrete(part.data), KEYS)
        return part.column(
            "dataset.label", None, columns_of(part.data, datasets.ClassLabel), "column of class labels"
        )

    def _labels(self, part: Part) -> np.ndarray:
        """The published label of each row, int64 [n] or str [n]."""
        return part.values(self._label_column(part))

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their numbers."""
        train = self._part("train")
        names = getattr(train.data.features[self._label_column(train)], "names", None)
        return tuple(names or map(str, self._classes))

    @cached_property
    def _classes(self) -> dict[Any, int]:
        """The number of each label: its own in a column of class labels, else by its place among those of the training
        split. Labels below 0 say that a label is not known."""
        train = self._split("train_split", self.train_split)
        names = getattr(train.data.features[self._label_column(train)], "names", None)
        values = range(len(names)) if names else sorted(set(self._labels(train).tolist()))
        return {
            value: number for number, value in enumerate(v for v in values if isinstance(v, str) or v >= 0)
        }

    def _numbered(self, part: Part) -> np.ndarray:
        """The labels int64 [n] of rows, counted from 0. Raises `UserError` for one that is no class's."""
        labels = self._labels(part).tolist()
        numbers = np.array([self._classes.get(label, -1) for label in labels], dtype=np.int64)
        for index in np.flatnonzero(numbers < 0)[:1]:
            raise UserError(
                f"{part.place(index)}: its label is {labels[index]}, which is no class of the training examples (a "
                "split without labels?): set dataset.test_split to another one, or to none to hold out a share; labels "
                "are names, or numbers from 0."
            )
        return numbers

    # ---- examples

    def _count(self, part: Part) -> int:
        """The number of examples that the rows make."""
        return len(part.rows)

    @abstractmethod
    def _examples(self, part: Part, chosen: np.ndarray) -> ArraySet | ArraySet:
        """The examples of these numbers (int64 [n], sorted), counted over all that the rows make."""

    def _chosen(self, split: str, count: int) -> np.ndarray:
        """The numbers of the examples in use, drawn by the seed: a table is often sorted by label."""
        limit = self.train_rows if split == "train" else self.test_rows
        if limit is None:
            return np.arange(count)
        check_range(f"dataset.{split}_rows", limit, low=1, high=count)
        return np.sort(numpy_generator(self.data_seed, f"{split}_rows").choice(count, limit, replace=False))

    def read(self, split: str) -> ArraySet | ArraySet:
        part = self._part(split)
        self.rows_to_read(split, count := self._count(part), self.origin)
        return self._examples(part, self._chosen(split, count))

    def load(self) -> Data:
        return replace(super().load(), class_names=() if self.is_regression else self._names)

    @property
    def remarks(self) -> list[str]:
        of_classes = "" if self.is_regression else f", {self.classes} classes"
        sizes = f"{self.effective_train_size:,} training and {self.effective_test_size:,} test"
        lines = [f"Data: {sizes} {self.shape_text}{of_classes}"]
        if self.test_split == HELD_OUT:
            strata = f"each {self.group_by or 'class'} of split" if self.group_by or self.classes else "split"
            lines.append(
                f"Its test {self.things} are held out: a share of {self.test_fraction:g} of {strata} "
                f"{self.train_split}, the same for every seed"
            )
        elif self.test_split != "test":
            lines.append(f"Its test {self.things} are those of split {self.test_split}")
        return lines


def held_out(strata: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """bool [N]: a random share of each stratum, some and not all of those with two rows or more.

    strata: [N] values of any kind that sorts.
    """
    chosen = np.zeros(len(strata), dtype=bool)
    rng = numpy_generator(seed, "held_out_test")
    _, number = np.unique(strata, return_inverse=True)
    order = np.argsort(number, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(number[order])) + 1):
        if len(rows) > 1:
            count = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
            chosen[rng.choice(rows, count, replace=False)] = True
    return chosen
