"""Any labelled images in a table: a source that reads its facts from the data, where the config does not state them.

The config hash, costs and models need the facts before the data; so a run first has its source `described`, and its
config.yaml records what was found. A source whose facts are known is not described again: it holds the data to them.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch

from fedspa.core.errors import UserError, check_choice, check_range, nearest
from fedspa.core.randomness import numpy_generator
from fedspa.data.image_set import ImageSet
from fedspa.data.pictures import CHANNELS, RESIZES, BadPicture, Fit, channels_of, opened, size_of
from fedspa.data.source import ImageData, ImageSource
from fedspa.data.table import Table, chosen_columns, class_names

if TYPE_CHECKING:
    import datasets

SAMPLE = 1000
"""Training images, evenly spaced, that size, channels, mean and standard deviation are told from."""
HELD_OUT = "none"
"""The test split of a data set that has none, or whose own is not to be used."""
TEST_SPLITS = ("test", "validation", "valid", "val", "dev")
"""Which split is taken for the test split, the first that there is."""

_described: dict[str, Any] = {}
_opened: dict[tuple[str | None, ...], Mapping[str, datasets.Dataset]] = {}


class Part(NamedTuple):
    """The rows int64 [n] of a table that are one of our splits."""

    table: Table
    rows: np.ndarray


@dataclass(kw_only=True)
class TableImages(ImageSource):
    """Images of any size and colour mode, labels that are numbers or names, in one table a split."""

    # Facts: 0 and [] stand for "told from the data".
    classes: int = 0
    channels: int = 0
    image_size: int = 0
    """0: the images' own size. Another one needs `resize`."""
    train_size: int = 0
    test_size: int = 0
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)

    image: str | None = None
    """The column of the images; null: the only one there is."""
    label: str | None = None
    """The column of the labels, whole numbers or names; null: the only one of class labels, or the names of folders."""
    train_split: str = "train"
    test_split: str | None = None
    """null: test or validation, whichever there is; none: a share of the training split is held out."""
    test_fraction: float = 0.2
    """That share, taken from each class, or from each group where there is a `group_by`."""
    group_by: str | None = None
    """A column, such as the writer, that natural partitions go by; null: the one that partition.column names."""
    data_seed: int = 0
    """Of the held-out share, and of which `train_rows` are used. Not the run's: all its seeds share one data set."""
    resize: str | None = None
    """crop (the middle square), pad (with black) or stretch to dataset.image_size; null: images are as they are."""
    colour: str | None = None
    """Turn all images into grey, rgb or rgba ones; null: as they are."""
    background: int | None = None
    """The grey value, 0 to 255, behind transparent pixels; null: transparent pixels are refused."""
    white: int | None = None
    """The value of images of more than 8 bits a channel that becomes 255; null: such images are refused."""

    def __post_init__(self) -> None:
        check_range("dataset.test_fraction", self.test_fraction, low=0, high=1, low_open=True, high_open=True)
        check_range("dataset.data_seed", self.data_seed, low=0)
        if self.resize is not None:
            check_choice("dataset.resize", self.resize, RESIZES)
            if not self.image_size:
                raise UserError(f"dataset.resize={self.resize} needs a dataset.image_size, such as 32.")
        if self.colour is not None:
            check_choice("dataset.colour", self.colour, CHANNELS)
        if self.background is not None:
            check_range("dataset.background", self.background, low=0, high=255)
        if self.white is not None:
            check_range("dataset.white", self.white, low=1)
        self.check_settings()
        if self.is_described:
            self.check_facts()

    @abstractmethod
    def open(self) -> Mapping[str, datasets.Dataset]:
        """The splits by name. Raises `UserError` where there are none to be had."""

    @property
    @abstractmethod
    def origin(self) -> str:
        """The setting that says where the images come from, for error sentences."""

    @property
    @abstractmethod
    def key(self) -> tuple[str | None, ...]:
        """Equal for sources that `open` the same tables."""

    def pinned(self) -> Self:
        """The same source, with what identifies its version; nobody is asked for what is stated already."""
        return self

    @property
    def is_described(self) -> bool:
        """Whether nothing has to be told from the data."""
        counts = self.classes, self.channels, self.image_size, self.train_size, self.test_size
        return all([*counts, self.mean, self.std, self.test_split])

    def described(self, group_by: str | None) -> Self:
        if self.group_by and group_by and self.group_by != group_by:
            raise UserError(
                f"dataset.group_by={self.group_by} and partition.column={group_by} differ: leave dataset.group_by out."
            )
        wanted = replace(self, group_by=self.group_by or group_by).pinned()
        if group_by and not self.group_by:
            _check_split("train_split", self.train_split, list(wanted._tables), self.origin)
            wanted._table(self.train_split, "partition.column")
            if (test := wanted._test_split) != HELD_OUT and group_by not in wanted._tables[test].column_names:
                raise UserError(
                    f"partition.column={group_by} is no column of {self.origin}, split {test}: dataset.test_split=none "
                    "holds out a share of each client's own training images instead."
                )
        if wanted.is_described:
            return wanted
        key = json.dumps([type(self).__name__, asdict(wanted)], sort_keys=True)
        if key not in _described:
            _described[key] = wanted._described()
        return _described[key]

    def _described(self) -> Self:
        """The same with all facts, of which those that are given must be right."""
        found = {**self._counts(), **self._shape()}
        for name, value in found.items():
            given = getattr(self, name)
            if given and given != value and name not in ("mean", "std", "image_size"):
                raise UserError(f"dataset.{name}={given} is not so: {self.origin} has {value}; leave it out.")
        normalised = replace(self, **found, mean=self.mean or [0.5], std=self.std or [0.5])
        if not (self.mean and self.std):
            train = normalised._parts["train"]
            floats = train.table.pixels(_sample(train.rows), normalised._fit) / 255.0
            mean, std = (np.asarray(f(axis=(0, 1, 2))).round(4) for f in (floats.mean, floats.std))
            normalised = replace(
                normalised, mean=self.mean or mean.tolist(), std=self.std or np.maximum(std, 0.0039).tolist()
            )
        return normalised

    def _counts(self) -> dict[str, Any]:
        if len(self._names) == 1:
            raise UserError(f"{self.origin} has one class only, {self._names[0]}: {self.few_classes}.")
        return {
            "classes": len(self._names),
            "train_size": len(self._whole["train"].rows),
            "test_size": len(self._whole["test"].rows),
            "test_split": self._test_split,
        }

    def _shape(self) -> dict[str, Any]:
        """image_size and channels, from a sample of the training images."""
        train, channels = self._parts["train"], 1
        sizes: dict[tuple[int, int], int] = {}
        sample = _sample(train.rows)
        for row, encoded in zip(sample, train.table.encoded(sample), strict=True):
            try:
                picture = opened(encoded)
                sizes.setdefault(size_of(picture), row)
            except BadPicture as fault:
                raise UserError(f"{train.table.place(row)}: {fault}.") from fault
            channels = max(channels, channels_of(picture))
        if self.colour:
            channels = CHANNELS[self.colour]
        (width, height), row = next(iter(sizes.items()))
        if self.resize is None and (len(sizes) > 1 or width != height):
            place = train.table.place(row)
            if width == height:
                (width, height), row = list(sizes.items())[1]
                place = f"{train.table.place(row)}, unlike the first ones"
            raise UserError(
                f"{place}: the image is {width} x {height} pixels, but models take square images of one size: set "
                f"dataset.image_size, such as 32, and dataset.resize to crop, pad or stretch."
            )
        return {"image_size": self.image_size or width, "channels": channels}

    @property
    def _fit(self) -> Fit:
        return Fit(self.image_size, self.channels, self.resize, self.colour, self.background, self.white)

    # ---- the splits

    @property
    def _tables(self) -> Mapping[str, datasets.Dataset]:
        """Opened once in a process: a run describes its data, then reads it."""
        if (key := self.key) not in _opened:
            _opened[key] = self.open()
        return _opened[key]

    @cached_property
    def _test_split(self) -> str:
        if self.test_split is not None:
            if self.test_split != HELD_OUT:
                _check_split("test_split", self.test_split, [*self._tables, HELD_OUT], self.origin)
            return self.test_split
        others = (name for name in TEST_SPLITS if name in self._tables and name != self.train_split)
        return next(others, HELD_OUT)

    def _table(self, split: str, grouping: str = "dataset.group_by") -> Table:
        """`grouping` is the setting that names the column `group_by`, for error sentences."""
        data, where = self._tables[split], f"{self.origin}, split {split}"
        return Table(
            data, where, chosen_columns(data, where, self.image, self.label_column, self.group_by, grouping)
        )

    few_classes: ClassVar[str] = "two or more are needed; dataset.label names the column of the labels"
    """What would be right where the data has one class only."""

    @property
    def label_column(self) -> str | None:
        """The column of the labels, where it is known by its name."""
        return self.label

    @cached_property
    def _train_table(self) -> Table:
        _check_split("train_split", self.train_split, list(self._tables), self.origin)
        return self._table(self.train_split)

    @cached_property
    def _train_labels(self) -> np.ndarray:
        return self._train_table.labels()

    @cached_property
    def _held_out(self) -> np.ndarray:
        """bool [N]: the rows of the training table that are the test split."""
        if self._test_split != HELD_OUT:
            return np.zeros(len(self._train_table), dtype=bool)
        groups = self._train_table.groups()
        return held_out(self._train_labels if groups is None else groups, self.test_fraction, self.data_seed)

    @cached_property
    def _whole(self) -> dict[str, Part]:
        """Both splits, whatever row limits there are."""
        table = self._train_table
        train = Part(table, np.flatnonzero(~self._held_out))
        if self._test_split == HELD_OUT:
            test = Part(table, np.flatnonzero(self._held_out))
        else:
            other = self._table(self._test_split)
            test = Part(other, np.arange(len(other)))
        if not len(train.rows) or not len(test.rows):
            raise UserError(
                f"{self.origin} has {len(train.rows)} training and {len(test.rows)} test images: too few."
            )
        return {"train": train, "test": test}

    @cached_property
    def _parts(self) -> dict[str, Part]:
        limits = {"train": self.train_rows, "test": self.test_rows}
        return {
            split: Part(part.table, self._limited(part.rows, limits[split], split))
            for split, part in self._whole.items()
        }

    def _limited(self, rows: np.ndarray, limit: int | None, split: str) -> np.ndarray:
        """So many of the rows, drawn by the seed: a table is often sorted by label."""
        if limit is None:
            return rows
        check_range(f"dataset.{split}_rows", limit, low=1, high=len(rows))
        return np.sort(numpy_generator(self.data_seed, f"{split}_rows").choice(rows, limit, replace=False))

    # ---- labels

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their numbers."""
        label = self._train_table.columns.label
        if label and (names := class_names(self._train_table.data, label)):
            return tuple(names)
        return tuple(str(value) for value in self._values)

    @cached_property
    def _values(self) -> list[Any]:
        """The labels as they are published, sorted: those of the training table.

        Raises `UserError` where one is below 0, or where the test split has another.
        """
        found = set(self._train_labels.tolist())
        self._check_labels(self._train_table, self._train_labels, found)
        if self._test_split != HELD_OUT:
            table = self._table(self._test_split)
            self._check_labels(table, table.labels(), found)
        return sorted(found)

    @staticmethod
    def _check_labels(table: Table, labels: np.ndarray, classes: set[Any]) -> None:
        """Whole numbers below 0 say that a label is not known, as those of unlabelled test splits do."""
        for row, label in enumerate(labels.tolist()):
            if label not in classes:
                raise _no_class(table, row, label, "which no training image has")
            if not isinstance(label, str) and label < 0:
                raise _no_class(table, row, label, "which stands for no class")

    def _numbered(self, table: Table, rows: np.ndarray) -> np.ndarray:
        """The labels int64 [n] of rows, counted from 0. Raises `UserError` for one that is no class's."""
        published = self._train_labels if table is self._train_table else table.labels()
        label = table.columns.label
        if label and class_names(self._train_table.data, label):
            numbers = published[rows]
            bad = np.flatnonzero((numbers < 0) | (numbers >= len(self._names)))
            if len(bad):
                raise _no_class(table, rows[bad[0]], numbers[bad[0]], "which stands for no class")
            return numbers.astype(np.int64)
        index = {value: number for number, value in enumerate(self._values)}
        return np.array([index[value] for value in published[rows].tolist()], dtype=np.int64)

    # ---- what every source has

    def load(self) -> ImageData:
        return replace(super().load(), class_names=self._names)

    def read(self, split: str) -> ImageSet:
        self.check_version()
        table, rows = self._parts[split]
        self.rows_to_read(split, len(self._whole[split].rows), self.origin)
        labels = torch.from_numpy(self._numbered(table, rows))
        groups = table.groups()
        pixels = torch.from_numpy(table.pixels(rows, self._fit)).permute(0, 3, 1, 2)
        return ImageSet(pixels, labels, None if groups is None else groups[rows])

    def check_version(self) -> None:
        """Raise `UserError` where the data is not that of the recorded version."""

    @property
    def remarks(self) -> list[str]:
        shape = f"{self.channels} x {self.image_size} x {self.image_size}"
        lines = [
            f"Data: {self.effective_train_size:,} training and {self.effective_test_size:,} test images of {shape}, "
            f"{self.classes} classes"
        ]
        if self.test_split == HELD_OUT:
            by = self.group_by or "class"
            lines.append(
                f"Its test images are held out: a share of {self.test_fraction:g} of each {by} of split "
                f"{self.train_split}, the same for every seed"
            )
        elif self.test_split != "test":
            lines.append(f"Its test images are those of split {self.test_split}")
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


def _sample(rows: np.ndarray) -> np.ndarray:
    """Evenly spaced ones of the rows, the first among them."""
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(np.int64))]


def _no_class(table: Table, row: int, label: Any, why: str) -> UserError:
    return UserError(
        f"{table.place(row)}: its label is {label}, {why} (a test split without labels?): set dataset.test_split to "
        "another one, or to none to hold out a share; labels are names, or numbers from 0."
    )


def _check_split(setting: str, name: str, valid: list[str], origin: str) -> None:
    if name not in valid:
        raise UserError(f"dataset.{setting}={name} is no split of {origin}: {nearest(name, valid)}.")
