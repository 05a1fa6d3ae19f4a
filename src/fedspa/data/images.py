"""Labelled images from anywhere: the hub, Parquet, folders of image files, archives and IDX files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import datasets
import numpy as np
import torch
from datasets.utils import tqdm

from fedspa.core.errors import UserError, brief, check_range
from fedspa.core.limits import limited
from fedspa.data import image_files
from fedspa.data.parts import Labels, Part
from fedspa.data.pictures import CHANNELS, RESIZES, BadPicture, Fit, channels_of, opened
from fedspa.data.sets import ArraySet
from fedspa.data.source import ImageSource
from fedspa.data.tables import TableSource

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

SAMPLE = 1000
"""Training images, evenly spaced, that size, channels, mean and standard deviation are read from."""
ROWS_AT_ONCE = 1000
BAR_AFTER = 10.0
"""Seconds."""


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
    resize: str | None = limited(None, choices=RESIZES)
    """crop (the middle part), pad (with black) or stretch to dataset.image_size; null: images are as they are."""
    colour: str | None = limited(None, choices=CHANNELS)
    """Turn all images into grey, rgb or rgba ones; null: as they are."""
    background: int | None = limited(None, low=0, high=255)
    """The grey value, 0 to 255, behind transparent pixels; null: transparent pixels are refused."""
    white: int | None = limited(None, low=1)
    """The value of images of more than 8 bits a channel that becomes 255; null: such images are refused."""

    FACTS: ClassVar[tuple[str, ...]] = (*TableSource.FACTS, "channels", "image_size", "mean", "std")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size:
            check_range("dataset.image_size", min(self.sides), low=1)
        elif self.resize is not None:
            raise UserError(f"dataset.resize={self.resize} needs a dataset.image_size, such as 32.")

    def _describe(self) -> None:
        train = self._split("train_split", self.train_split)
        if not train.columns_of(datasets.Image):
            raise UserError(f"{train.where} holds no images: use dataset=table or dataset=text.")
        super()._describe()
        self._set(**self._shape())
        if not (self.mean and self.std):
            pixels = self._pixels(self._sample()) / 255.0
            mean, std = (np.asarray(f(axis=(0, 1, 2))).round(4) for f in (pixels.mean, pixels.std))
            self.mean, self.std = self.mean or mean.tolist(), self.std or np.maximum(std, 0.0039).tolist()

    def _sample(self) -> Part:
        """Evenly spaced ones of the training images in use, the first among them."""
        part = self._part("train")
        rows = part.rows[self._chosen("train", len(part.rows))]
        return part.of(
            rows[np.unique(np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(np.int64))]
        )

    def _shape(self) -> dict[str, Any]:
        """image_size and channels, from a sample."""
        part = self._sample()
        shapes = list(self._each(part, lambda picture: (picture.size, channels_of(picture))))
        sizes = [size for size, _ in shapes]
        (width, height), *others = dict.fromkeys(sizes)
        if self.resize is None and others:
            raise UserError(
                f"{part.place(sizes.index(others[0]))}, unlike the first ones: the image is {others[0][0]} x "
                f"{others[0][1]} pixels, but models take images of one size: set dataset.image_size, such as 32, and "
                "dataset.resize to crop, pad or stretch."
            )
        size = self.image_size or (height if height == width else [height, width])
        channels = CHANNELS[self.colour] if self.colour else max(channels for _, channels in shapes)
        return {"image_size": size, "channels": channels}

    def open(self) -> Mapping[str, datasets.Dataset]:
        if not self.path:
            return super().open()
        return image_files.open_images(self.path, self.origin, self._split_names, self.label)

    def _label_column(self, part: Part) -> str:
        folders = [
            name for name in (image_files.CLASS, "label") if self.label is None and name in part.discrete
        ]
        return folders[0] if folders else super()._label_column(part)

    def _each(self, part: Part, use: Callable[[Image], T]) -> Iterator[T]:
        """The results of `use` for each picture. Raises `UserError` with the row of one that is broken."""
        pictures = part.columns_of(datasets.Image)
        column = part.column("dataset.image", self.image, pictures, "image column")
        encoded = part.data.select_columns([column]).select(part.rows).with_format("arrow")
        cells = (cell for table in encoded.iter(ROWS_AT_ONCE) for cell in table.column(0).to_pylist())
        for index, cell in enumerate(cells):
            try:
                yield use(opened(cell["bytes"] or _file_bytes(cell["path"])))
            except BadPicture as fault:
                raise UserError(f"{part.place(index)}: {fault}.") from fault
            except (OSError, TypeError) as error:  # the file is gone, or the cell is empty
                raise UserError(f"{part.place(index)}: its image cannot be read ({brief(error)}).") from error

    def _pixels(self, part: Part) -> np.ndarray:
        """The decoded images uint8 [n, height, width, channels]; a bar shows the progress if that takes long."""
        fit = Fit(*self.sides, self.channels, self.resize, self.colour, self.background, self.white)
        pixels = np.empty((len(part.rows), *self.sides, self.channels), dtype=np.uint8)
        decoded = tqdm(self._each(part, fit.pixels), part.where, len(pixels), delay=BAR_AFTER, leave=False)
        for index, image in enumerate(decoded):
            pixels[index] = image
        return pixels

    def _examples(self, part: Part, chosen: np.ndarray) -> ArraySet:
        part = part.of(part.rows[chosen])
        pixels, labels = self._pixels(part), torch.from_numpy(self._labels.numbered(part))
        return ArraySet(torch.from_numpy(pixels).permute(0, 3, 1, 2), labels, self._groups(part))


@dataclass(kw_only=True)
class PublishedImages(Images):
    """A well-known data set whose facts the config states, so that nothing is read before the run. Labels are whole
    numbers from 0, or from 1 to `classes`. A row limit takes the first rows, in the published order."""

    FACTS: ClassVar[tuple[str, ...]] = ()

    test_split: str | None = "test"
    transpose: bool = False
    """Swap rows and columns of every image: EMNIST is published lying on its side."""

    def described(self, group_by: str | None) -> Self:
        return replace(self, group_by=self.group_by or group_by)

    def _chosen(self, split: str, count: int) -> np.ndarray:
        return np.arange(self.rows_to_read(split, count, self.origin))

    @cached_property
    def _labels(self) -> Labels:
        parts = [self._split("train_split", split) for split in self._tables]
        labels = {label for part in parts for label in part.values(self._label_column(part))}
        first = int({1, self.classes} <= labels and 0 not in labels)
        fault = f"out of range: with dataset.classes={self.classes} it must be {first} to {first + self.classes - 1}"
        column = self._label_column(parts[0])
        return Labels(column, {first + number: number for number in range(self.classes)}, fault=fault)

    def _pixels(self, part: Part) -> np.ndarray:
        pixels = super()._pixels(part)
        return np.ascontiguousarray(pixels.transpose(0, 2, 1, 3)) if self.transpose else pixels


def _file_bytes(path: str) -> bytes:
    """The bytes of a regular file: a device would never end. Raises `OSError`, and `TypeError` without a path."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is no file")
    return Path(path).read_bytes()
