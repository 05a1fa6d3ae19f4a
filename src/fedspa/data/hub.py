"""Images from the Hugging Face hub by name, or from a folder of Parquet files in the hub's layout."""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedspa.core.errors import UserError, brief, check_choice
from fedspa.data.image_set import ImageSet
from fedspa.data.parquet import ROWS_AT_ONCE, Shard, decode_shard, folder_shards
from fedspa.data.source import ImageSource


@dataclass(kw_only=True)
class HubImages(ImageSource):
    """With `path`, a folder read by pyarrow and Pillow alone; without, a download by `datasets`."""

    hub: str
    """The data set's name on the hub, as uoft-cs/cifar10."""
    image: str = "image"
    """The column of the images."""
    label: str = "label"
    path: str | None = None
    """A folder that holds train*.parquet and test*.parquet (see `fedspa.data.parquet`)."""
    transpose: bool = False
    """Swap rows and columns of every image: EMNIST is published lying on its side."""
    label_offset: int | None = 0
    """Subtracted from every label. null: told from the labels, 1 if they run from 1 to `classes`, else 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("dataset.channels", str(self.channels), ("1", "3"))

    def read(self, split: str) -> ImageSet:
        shards = self._folder(split) if self.path else [self._download(split)]
        rows = self.rows_to_read(split, sum(shard.rows for shard in shards), self.origin)
        pixels = np.empty((rows, self.image_size, self.image_size, self.channels), dtype=np.uint8)
        labels = np.empty(rows, dtype=np.int64)
        starts = list(itertools.accumulate((shard.rows for shard in shards), initial=0))
        for shard, first in zip(shards, starts, strict=False):
            part = slice(first, first + shard.rows)  # the last one is cut where the arrays end
            decode_shard(shard, self.image, self.label, pixels[part], labels[part])

        def place(row: int) -> str:
            shard = bisect.bisect_right(starts, row) - 1
            return f"{shards[shard].where}, row {row - starts[shard]} (from 0)"

        return self.image_set(pixels, labels, place)

    def image_set(self, pixels: np.ndarray, labels: np.ndarray, place: Callable[[int], str]) -> ImageSet:
        """An image set of pixels uint8 [N, H, W, C] and labels int64 [N] as they are published.

        Raises `UserError` for a label out of range; `place` says where a row lies.
        """
        offset = self._offset(labels)
        if len(bad := np.flatnonzero((labels < offset) | (labels >= offset + self.classes))):
            raise UserError(
                f"{place(bad[0])}: the label {labels[bad[0]]} is out of range: with dataset.classes={self.classes} "
                f"and dataset.label_offset={offset} it must be {offset} to {offset + self.classes - 1}."
            )
        if self.transpose:
            pixels = np.ascontiguousarray(pixels.transpose(0, 2, 1, 3))
        return ImageSet(torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.from_numpy(labels - offset))

    @property
    def origin(self) -> str:
        """The setting that says where the images come from, for error sentences."""
        return f"dataset.path={self.path}" if self.path else f"dataset.hub={self.hub}"

    def _offset(self, labels: np.ndarray) -> int:
        if self.label_offset is not None:
            return self.label_offset
        low, high = int(labels.min()), int(labels.max())
        if low >= 1 and high < self.classes:
            raise UserError(
                f"dataset.label_offset=null cannot tell from labels {low} to {high} whether the "
                f"dataset.classes={self.classes} are counted from 0 or from 1: set it to 0 or 1."
            )
        return 1 if low >= 1 and high == self.classes else 0

    def _folder(self, split: str) -> list[Shard]:
        pixels = self.image_size**2 * self.channels
        return folder_shards(Path(self.path or "").expanduser(), split, [self.image, self.label], pixels)

    def _download(self, split: str) -> Shard:
        from datasets import load_dataset

        logging.getLogger(
            "huggingface_hub"
        ).propagate = False  # it prints itself: else each retry is told twice

        try:
            data = load_dataset(self.hub, split=split).with_format("arrow")
        except Exception as error:  # the network, the hub and the disk fail in many ways
            raise UserError(
                f"dataset.hub={self.hub} cannot be downloaded ({brief(error)}): check the name and the "
                f"network, or set dataset.path to a folder with its Parquet files."
            ) from error
        return Shard(self.origin, len(data), data.features.arrow_schema, data.iter(ROWS_AT_ONCE))
