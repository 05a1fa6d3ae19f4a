"""Data in tables, of the hub or of files. A source reads its facts from the data if the config leaves them open.

The config hash, costs and models need the facts before the data. So a run first has its source `described`, and its
config.yaml records the facts. A source whose facts are all stated is not described again: the data is checked.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import datasets
import numpy as np

from fedspa.core.errors import UserError, check_range, nearest
from fedspa.core.limits import limited
from fedspa.core.randomness import numpy_generator
from fedspa.data import files, hub
from fedspa.data.parts import KEYS, Labels, Part
from fedspa.data.sets import ArraySet, held_out_count
from fedspa.data.source import SPLITS, Source

HELD_OUT = "none"
"""The test split of a data set that has none, or whose own is not to be used."""
TEST_SPLITS = ("test", "validation", "valid", "val", "dev")
"""The first of these that a data set has is its test split."""

_described: dict[str, Any] = {}


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
    """A hash of the names and sizes of all files that are read. Another fingerprint is another data set."""
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
    test_fraction: float = limited(0.2, low=0, high=1, low_open=True, high_open=True)
    """The share that is held out, taken from each class, or from each group if there is a `group_by`."""
    group_by: str | None = None
    """A column, such as the writer, that natural partitions go by; null: the one that partition.column names."""
    data_seed: int = limited(0, low=0)
    """The seed of the held-out share and of `train_rows`. It is not the run's: all its seeds share one data set."""

    FACTS: ClassVar[tuple[str, ...]] = ("outputs", "train_size", "test_size", "test_split")
    """The fields and properties that the data decides."""

    # ---- the facts

    @property
    def is_described(self) -> bool:
        return all(getattr(self, name) for name in self.FACTS)

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
        wanted = replace(self._pinned(), group_by=self.group_by or group_by)
        if group_by and not self.group_by:
            train = wanted._split("train_split", self.train_split)
            train.column("partition.column", group_by, train.discrete, KEYS)
        if wanted.is_described:
            return wanted
        key = json.dumps([type(self).__name__, asdict(wanted)], sort_keys=True)
        if key not in _described:  # once in a process, for all jobs of a sweep
            wanted._describe()
            wanted.check_facts()
            _described[key] = wanted
        return _described[key]

    def _pinned(self) -> Self:
        """A copy with its version. A version that is stated is used without a question to the hub."""
        if self.path:
            found = files.fingerprint(self.path, self.origin)
            if self.fingerprint and found != self.fingerprint:
                raise UserError(
                    f"{self.origin} holds other files than those that dataset.fingerprint={self.fingerprint} was taken "
                    f"from: theirs is {found}; leave it out to take the data as it is."
                )
            return replace(self, fingerprint=found)
        if self.fingerprint:  # a recorded config, read where the files are not
            return self
        if not self.hub:
            raise UserError(
                "dataset.path=<file or folder> is missing (of the hub: dataset=hub dataset.name=<organisation/name>)."
            )
        subset, commit = hub.pinned(self.hub, self.subset, self.revision, self.origin)
        return replace(self, subset=subset, revision=commit)

    def _describe(self) -> None:
        """Read the facts from the data. Raises `UserError` for data that cannot be used."""
        parts = {split: self._part(split) for split in SPLITS}
        for part in parts.values():
            self._groups(part)
        if self._is_labelled:
            if len(self._labels.numbers) == 1:
                raise UserError(
                    f"{self.origin} has one class only, {self._labels.names[0]}: two or more are needed, each with a "
                    "folder of its own, or dataset.label names the column of the labels."
                )
            for part in parts.values():
                self._labels.numbered(part)
            self._set(classes=len(self._labels.numbers))
        sizes = {f"{split}_size": self._count(part) for split, part in parts.items()}
        self._set(test_split=self._test_split, **sizes)

    def _set(self, **facts: Any) -> None:
        """Set facts. Raises `UserError` for one that the config states otherwise."""
        for name, value in facts.items():
            if (given := getattr(self, name)) and given != value:
                raise UserError(f"dataset.{name}={given} is not so: {self.origin} has {value}; leave it out.")
            setattr(self, name, value)

    # ---- the splits

    def open(self) -> Mapping[str, datasets.Dataset]:
        """The splits by name. Raises `UserError` if they cannot be read."""
        if self.path:
            return files.open_tables(self.path, self.origin, self._split_names)
        assert self.hub is not None
        return hub.open_tables(self.hub, self.subset, self.revision, self.origin)

    @property
    def _split_names(self) -> list[str]:
        """The possible names of splits, that of the training split first."""
        return list(dict.fromkeys([self.train_split, *filter(None, [self.test_split]), *TEST_SPLITS]))

    @cached_property
    def _tables(self) -> Mapping[str, datasets.Dataset]:
        return self.open()

    @cached_property
    def _test_split(self) -> str:
        others = (name for name in TEST_SPLITS if name in self._tables and name != self.train_split)
        return self.test_split or next(others, HELD_OUT)

    def _split(self, setting: str, name: str, *further: str) -> Part:
        """All rows of a split. Raises `UserError` if there is no such split; `further` names are valid too."""
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
            labelled = self._is_labelled
            strata = whole.values(self._label_column(whole)) if labelled else np.zeros(len(whole.rows))
        return held_out(strata, self.test_fraction, self.data_seed)

    def _part(self, split: str) -> Part:
        """All rows of "train" or "test", for any row limit."""
        if split == "test" and self._test_split != HELD_OUT:
            part = self._split("test_split", self._test_split, HELD_OUT)
        else:
            part = self._split("train_split", self.train_split)
            if self._test_split == HELD_OUT:
                part = part.of(np.flatnonzero(self._held_out == (split == "test")))
        if not len(part.rows):
            raise UserError(f"{self.origin} has no {split} {self.things}: there are too few.")
        return part

    # ---- the columns

    def _groups(self, part: Part) -> np.ndarray | None:
        """The value of the group column in each row, str [n]. None without one, and for a test split without it."""
        column = self.group_by
        if column is None or (
            column not in part.data.features and part.data is not self._tables[self.train_split]
        ):
            return None
        part.column("dataset.group_by", column, part.discrete, KEYS)
        names, values = part.names(column), part.values(column)
        return np.array([names[value] if names else str(value) for value in values], dtype=object)

    @property
    def _is_labelled(self) -> bool:
        """True if the targets are the classes of a column."""
        return not self.is_regression

    def _label_column(self, part: Part) -> str:
        if self.label:
            return part.column("dataset.label", self.label, part.discrete, KEYS)
        valid = part.columns_of(datasets.ClassLabel)
        return part.column("dataset.label", None, valid, "column of class labels")

    @cached_property
    def _labels(self) -> Labels:
        train = self._split("train_split", self.train_split)
        return Labels.of(train, self._label_column(train))

    @property
    def class_names(self) -> tuple[str, ...]:
        return self._labels.names if self._is_labelled else ()

    # ---- the examples

    def _count(self, part: Part) -> int:
        """The number of examples that the rows make."""
        return len(part.rows)

    @abstractmethod
    def _examples(self, part: Part, chosen: np.ndarray) -> ArraySet:
        """The examples of these numbers (int64 [n], sorted), counted over all that the rows make."""

    def _chosen(self, split: str, count: int) -> np.ndarray:
        """The numbers of the examples in use, drawn by the seed: a table is often sorted by label."""
        limit = self.train_rows if split == "train" else self.test_rows
        if limit is None:
            return np.arange(count)
        check_range(f"dataset.{split}_rows", limit, low=1, high=count)
        return np.sort(numpy_generator(self.data_seed, f"{split}_rows").choice(count, limit, replace=False))

    def read(self, split: str) -> ArraySet:
        part = self._part(split)
        self.rows_to_read(split, count := self._count(part), self.origin)
        return self._examples(part, self._chosen(split, count))

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
            chosen[rng.choice(rows, held_out_count(len(rows), fraction), replace=False)] = True
    return chosen
