"""Labelled images from anywhere: the hub, Parquet, folders of image files, archives and IDX files."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import datasets
import numpy as np
import torch

from fedspa.core.errors import UserError, brief, check_choice, check_range
from fedspa.data import files
from fedspa.data.pictures import CHANNELS, RESIZES, BadPicture, Fit, channels_of, opened, size_of
from fedspa.data.sets import ArraySet
from fedspa.data.source import ImageSource
from fedspa.data.tables import Part, TableSource, columns_of, discrete

SAMPLE = 1000
"""Training images, evenly spaced, that size, channels, mean and standard deviation are read from."""
ROWS_AT_ONCE = 1000
PROGRESS_SECONDS = 10.0


@dataclass(kw_only=True)
class Images(TableSource, ImageSource):
    """Images of any size and colour mode, with labels that are numbers or names.

    In a folder of image files the class is the folder directly below the split (or below `path`); the path below the
    class, such as that of a patient, is the column `folder`. A table beside the images (metadata.csv, or the only one
    in the folder) may give further columns, to label or to group by. Hidden files and folders do not count.
    """

    # Facts: 0 and [] stand for "read from the data".
    channels: int = 0
    image_size: Any = 0
    """0: the images' own size. Another one needs `resize`."""
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)

    image: str | None = None
    """The column of the images; null: the only one there is."""
    resize: str | None = None
    """crop (the middle part), pad (with black) or stretch to dataset.image_size; null: images are as they are."""
    colour: str | None = None
    """Turn all images into grey, rgb or rgba ones; null: as they are."""
    background: int | None = None
    """The grey value, 0 to 255, behind transparent pixels; null: transparent pixels are refused."""
    white: int | None = None
    """The value of images of more than 8 bits a channel that becomes 255; null: such images are refused."""

    def check_settings(self) -> None:
        super().check_settings()
        if self.image_size:
            check_range("dataset.image_size", min(self.sides), low=1)
        if self.resize is not None:
            check_choice("dataset.resize", self.resize, RESIZES)
            if not self.image_size:
                raise UserError(f"dataset.resize={self.resize} needs a dataset.image_size, such as 32.")
        if self.colour is not None:
            check_choice("dataset.colour", self.colour, CHANNELS)
        for name, value, low, high in (
            ("background", self.background, 0, 255),
            ("white", self.white, 1, None),
        ):
            if value is not None:
                check_range(f"dataset.{name}", value, low=low, high=high)

    @property
    def is_described(self) -> bool:
        shape = self.classes and self.channels and self.image_size and self.mean and self.std
        return super().is_described and bool(shape)

    def _with_facts(self) -> Self:
        """Mean and standard deviation are taken of images whose other facts are known."""
        shaped = self._agreed({**self._facts(), **self._shape()})
        known = replace(shaped, mean=self.mean or [0.5], std=self.std or [0.5])
        if not (self.mean and self.std):
            pixels = known._pixels(known._sample()) / 255.0
            mean, std = (np.asarray(f(axis=(0, 1, 2))).round(4) for f in (pixels.mean, pixels.std))
            known.mean, known.std = self.mean or mean.tolist(), self.std or np.maximum(std, 0.0039).tolist()
        return known

    def _sample(self) -> Part:
        """Evenly spaced ones of the training images in use, the first among them."""
        part = self._part("train")
        rows = part.rows[self._chosen("train", len(part.rows))]
        return part.of(
            rows[np.unique(np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(np.int64))]
        )

    def _shape(self) -> dict[str, Any]:
        """image_size and channels, from a sample."""
        part, channels = self._sample(), 1
        found: dict[tuple[int, int], int] = {}
        for index, encoded in enumerate(self._encoded(part)):
            try:
                picture = opened(encoded)
                found.setdefault(size_of(picture), index)
            except BadPicture as fault:
                raise UserError(f"{part.place(index)}: {fault}.") from fault
            channels = max(channels, channels_of(picture))
        (width, height), *others = found
        if self.resize is None and others:
            raise UserError(
                f"{part.place(found[others[0]])}, unlike the first ones: the image is {others[0][0]} x {others[0][1]} "
                "pixels, but models take images of one size: set dataset.image_size, such as 32, and dataset.resize to "
                "crop, pad or stretch."
            )
        size = self.image_size or (height if height == width else [height, width])
        return {"image_size": size, "channels": CHANNELS[self.colour] if self.colour else channels}

    def open(self) -> Mapping[str, datasets.Dataset]:
        from datasets.packaged_modules.imagefolder.imagefolder import IMAGE_EXTENSIONS

        root = files.unpacked(self.path, self.origin) if self.path else Path()
        if self.path and root.is_dir():
            found = files.files_below(root, self.origin)
            if any(parts[-1].lower().endswith(tuple(IMAGE_EXTENSIONS)) for parts in found):
                wanted = [p for p in found if p[-1].lower().endswith((*IMAGE_EXTENSIONS, *files.TABLES))]
                return files.image_folder(root, wanted, self.origin, self._split_names, self.label)
        return super().open()

    def _label_column(self, part: Part) -> str:
        if self.label is None:
            for name in (files.CLASS, "label"):
                if name in discrete(part.data):
                    return name
        return super()._label_column(part)

    def _encoded(self, part: Part) -> Iterator[bytes]:
        """The encoded images. Raises `UserError` with the row that cannot be read."""
        column = part.column(
            "dataset.image", self.image, columns_of(part.data, datasets.Image), "image column"
        )
        for first in range(0, len(part.rows), ROWS_AT_ONCE):
            for index, cell in enumerate(
                part.of(part.rows[first : first + ROWS_AT_ONCE]).cells(column), first
            ):
                try:
                    yield cell["bytes"] or _file_bytes(cell["path"])
                except (OSError, TypeError) as error:  # the file is gone, or the cell is empty
                    raise UserError(
                        f"{part.place(index)}: its image cannot be read ({brief(error)})."
                    ) from error

    def _pixels(self, part: Part) -> np.ndarray:
        """The decoded images uint8 [n, height, width, channels].

        Says how far it is, if that takes long. Raises `UserError` with the row of an image that is broken or does not
        fit.
        """
        fit = Fit(*self.sides, self.channels, self.resize, self.colour, self.background, self.white)
        pixels = np.empty((len(part.rows), *self.sides, self.channels), dtype=np.uint8)
        said = time.monotonic()
        for index, encoded in enumerate(self._encoded(part)):
            try:
                pixels[index] = fit.pixels(encoded)
            except BadPicture as fault:
                raise UserError(f"{part.place(index)}: {fault}.") from fault
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                print(
                    f"{part.where}: {index + 1:,} of {len(pixels):,} images are read.",
                    file=sys.stderr,
                    flush=True,
                )
        return pixels

    def _examples(self, part: Part, chosen: np.ndarray) -> ArraySet:
        part = part.of(part.rows[chosen])
        pixels, labels = self._pixels(part), torch.from_numpy(self._numbered(part))
        return ArraySet(torch.from_numpy(pixels).permute(0, 3, 1, 2), labels, self._groups(part))


@dataclass(kw_only=True)
class PublishedImages(Images):
    """A well-known data set whose facts the config states, so that nothing is read before the run. Labels are whole
    numbers from 0, or from 1 to `classes`. A row limit takes the first rows, in the published order."""

    test_split: str | None = "test"
    transpose: bool = False
    """Swap rows and columns of every image: EMNIST is published lying on its side."""

    @property
    def is_described(self) -> bool:
        return True

    def described(self, group_by: str | None) -> Self:
        return replace(self, group_by=self.group_by or group_by)

    @property
    def _names(self) -> tuple[str, ...]:
        return ()

    def _chosen(self, split: str, count: int) -> np.ndarray:
        return np.arange(self.rows_to_read(split, count, self.origin))

    def _numbered(self, part: Part) -> np.ndarray:
        every = self._labels(self._split("", part.where.rpartition(" ")[2]))
        first = 1 if every.dtype == np.int64 and (every.min(), every.max()) == (1, self.classes) else 0
        labels = self._labels(part)
        for index, label in enumerate(labels.tolist()):
            if isinstance(label, str) or not first <= label < first + self.classes:
                raise UserError(
                    f"{part.place(index)}: the label {label} is out of range: with dataset.classes={self.classes} it "
                    f"must be {first} to {first + self.classes - 1}."
                )
        return labels - first

    def _pixels(self, part: Part) -> np.ndarray:
        pixels = super()._pixels(part)
        return np.ascontiguousarray(pixels.transpose(0, 2, 1, 3)) if self.transpose else pixels

    @property
    def remarks(self) -> list[str]:
        return []


def _file_bytes(path: str) -> bytes:
    """The bytes of a regular file: a device would never end. Raises `OSError`, and `TypeError` without a path."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is no file")
    return Path(path).read_bytes()
