"""What every source of images is: declared facts, and a `load` that holds the data to them.

The facts (classes, sizes, channels) stand in the config, so that costs, models and hashes need no data.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from fedspa.core.errors import UserError, check_choice, check_range
from fedspa.data.image_set import Augmentation, ImageSet
from fedspa.data.made import MadeImages

SPLITS = ("train", "test")
ROWS_HASHED = 1024
"""At once: in one layout, whatever that of the source is, and without a copy of all."""


@dataclass(frozen=True)
class ImageData:
    """A data set in memory, decoded once, or made on demand. Clients hold row numbers into it, never copies."""

    train: ImageSet | MadeImages
    test: ImageSet | MadeImages
    class_names: tuple[str, ...] = ()
    """In the order of the labels, where the source knows them."""

    @property
    def train_labels(self) -> np.ndarray:
        """The labels int64 [N] of a train split in memory."""
        assert isinstance(self.train, ImageSet)
        return self.train.labels.numpy()

    @cached_property
    def hash(self) -> str:
        """16 hex digits of all pixels and labels in their order; "" of images that are made on demand."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.train, self.test):
            if not isinstance(part, ImageSet):
                return ""
            digest.update(f"{list(part.images.shape)}".encode())
            digest.update(part.labels.numpy().astype("<i8").tobytes())
            for piece in part.images.split(ROWS_HASHED):
                digest.update(piece.permute(0, 2, 3, 1).numpy().tobytes())
        return digest.hexdigest()


@dataclass(kw_only=True)
class ImageSource(ABC):
    """A labelled set of square images in a train and a test split."""

    name: str
    classes: int
    channels: int
    image_size: int
    """Side of the square images, in pixels."""
    train_size: int
    test_size: int
    mean: list[float]
    """Of each channel, for pixels in [0, 1]; a single value serves all channels."""
    std: list[float]
    augmentation: Augmentation = field(default_factory=Augmentation)
    train_rows: int | None = None
    """Use only the first so many training images."""
    test_rows: int | None = None
    val_fraction: float = 0.0
    """Share of each client's own training rows that is held out for validation."""
    client_test_images: int = 100
    """Test images of a client, drawn with its own label shares."""
    client_test_rounding: str = "exact"
    """exact: that many, by largest remainder. ceil: each class's share rounded up, as related code does."""
    least_test_share: float = 0.5
    """Where the test split has too few images of a class for a client's label shares, it gets fewer test images than
    `client_test_images`: the run is refused where that is less than this share of them."""

    def __post_init__(self) -> None:
        self.check_settings()
        self.check_facts()

    def check_settings(self) -> None:
        """Raise `UserError` for a setting that is wrong whatever the data is."""
        check_range("dataset.val_fraction", self.val_fraction, low=0, high=1, high_open=True)
        check_range("dataset.client_test_images", self.client_test_images, low=1)
        check_range("dataset.least_test_share", self.least_test_share, low=0, high=1)
        check_choice("dataset.client_test_rounding", self.client_test_rounding, ("exact", "ceil"))

    def check_facts(self) -> None:
        """Raise `UserError` for facts that cannot be, and for settings that do not go with them."""
        check_range("dataset.classes", self.classes, low=2)
        check_range("dataset.channels", self.channels, low=1)
        check_range("dataset.image_size", self.image_size, low=1)
        check_range("dataset.train_size", self.train_size, low=1)
        check_range("dataset.test_size", self.test_size, low=1)
        check_range("dataset.train_rows", self.effective_train_size, low=1, high=self.train_size)
        check_range("dataset.test_rows", self.effective_test_size, low=1, high=self.test_size)
        check_range(
            "dataset.augmentation.crop_padding", self.augmentation.crop_padding, high=self.image_size - 1
        )
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise UserError(
                    f"dataset.{key} has {len(values)} values: it must have 1, or one for each of the "
                    f"dataset.channels={self.channels}."
                )
        for value in self.std:
            check_range("dataset.std", value, low=0, low_open=True)

    @property
    def effective_train_size(self) -> int:
        """Training images in use: `train_size`, or what `train_rows` leaves of it."""
        return self.train_size if self.train_rows is None else self.train_rows

    @property
    def effective_test_size(self) -> int:
        """Test images in use."""
        return self.test_size if self.test_rows is None else self.test_rows

    def described(self, group_by: str | None) -> ImageSource:
        """The same source with every fact stated, read from the data where the config left it open.

        group_by: the column that the partition goes by. Raises `UserError` where the data cannot be had.
        """
        return self

    def images_in_memory(self, *, copies: bool = True) -> int:
        """How many images a process holds, once they are loaded: random crops read training images from a copy."""
        train = self.effective_train_size * (2 if copies and self.augmentation.crop_padding else 1)
        return train + self.effective_test_size

    @property
    def image_bytes(self) -> int:
        """Of one image."""
        return self.channels * self.image_size**2

    @property
    def remarks(self) -> list[str]:
        """What a user should be told of the data when a run begins, a sentence each."""
        return []

    @abstractmethod
    def read(self, split: str) -> ImageSet:
        """The first `rows_to_read` images of "train" or "test"; broken data raises `UserError`."""

    def load(self) -> ImageData:
        """Both splits, checked against the declared facts; a difference raises `UserError`."""
        train, test = (self._checked(split, self.read(split)) for split in SPLITS)
        return ImageData(train, test)

    def rows_to_read(self, split: str, found: int, where: str) -> int:
        """How many of the `found` rows of a split are used; refused where they are not what is declared.

        Without a row limit the split must have exactly its declared size, since costs and comparisons rest on
        it. With one, the split may have any size that holds so many rows. `where` says whose rows they are.
        """
        limit = self.train_rows if split == "train" else self.test_rows
        declared = self.train_size if split == "train" else self.test_size
        if limit is None and found != declared:
            raise UserError(
                f"{where} holds {found} {split} images, but dataset.{split}_size={declared} are declared: "
                f"set dataset.{split}_size={found} to use all, or dataset.{split}_rows for the first ones."
            )
        if limit is not None and limit > found:
            raise UserError(
                f"dataset.{split}_rows={limit} is more than the {found} {split} images that {where} holds: "
                f"it must be at most {found}."
            )
        return found if limit is None else limit

    def _checked(self, split: str, data: ImageSet) -> ImageSet:
        facts = (self.channels, self.image_size, self.image_size)
        if data.images.dtype != torch.uint8 or data.images.shape != (len(data.labels), *facts):
            raise UserError(
                f"dataset={self.name} gives {split} images {data.images.dtype} {list(data.images.shape)}: "
                f"they must be uint8 [{len(data.labels)}, {', '.join(map(str, facts))}]."
            )
        bad = torch.nonzero((data.labels < 0) | (data.labels >= self.classes))
        if len(bad):
            row = int(bad[0])
            raise UserError(
                f"dataset={self.name} has label {int(data.labels[row])} in row {row} (from 0) of its {split} "
                f"split: with dataset.classes={self.classes} it must be 0 to {self.classes - 1}."
            )
        return data
