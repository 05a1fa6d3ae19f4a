"""The idx files in which MNIST and its descendants are published, gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np

from fedspa.core.errors import UserError, brief
from fedspa.data.hub import HubImages
from fedspa.data.image_set import ImageSet

SPLIT_NAMES = {"train": ("train",), "test": ("t10k", "test")}
"""MNIST and Fashion-MNIST call their test files t10k, EMNIST test."""

UINT8 = 0x08


@dataclass(kw_only=True)
class IdxImages(HubImages):
    """idx files in `path`, or in `system_path` where no `path` is set; without such files, as `HubImages`."""

    system_path: str | None = None
    """Where a package of the operating system puts the files, if it is installed."""

    def read(self, split: str) -> ImageSet:
        folder = self.path or self.system_path
        files = folder and find_idx(Path(folder).expanduser(), split)
        if not files:
            return super().read(split)
        images, labels = files
        with open_idx(images, 3) as (pixel_stream, shape), open_idx(labels, 1) as (label_stream, (count,)):
            if shape[0] != count:
                raise UserError(f"{images} holds {shape[0]} images, but {labels} {count} labels.")
            if shape[1:] != (self.image_size, self.image_size):
                raise UserError(
                    f"{images} holds images of {shape[2]} x {shape[1]} pixels, but "
                    f"dataset.image_size={self.image_size}."
                )
            rows = self.rows_to_read(split, count, str(images))
            pixels = read_rows(images, pixel_stream, (rows, *shape[1:]))
            found = read_rows(labels, label_stream, (rows,))
        place = lambda row: f"{labels}, row {row} (from 0)"  # noqa: E731
        return self.image_set(pixels[:, :, :, None], found.astype(np.int64), place)


def find_idx(folder: Path, split: str) -> tuple[Path, Path] | None:
    """The image and the label file of a split, or None where the folder lacks either."""
    for name in SPLIT_NAMES[split]:
        images = sorted(folder.glob(f"*{name}-images?idx3-ubyte*"))
        labels = sorted(folder.glob(f"*{name}-labels?idx1-ubyte*"))
        if images and labels:
            return images[0], labels[0]
    return None


@contextmanager
def open_idx(file: Path, dims: int) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    """An idx file of uint8 data, open at its first row, and the shape that its header declares."""
    try:
        with _open(file) as stream:
            zeros, kind, rank, *shape = struct.unpack(f">HBB{dims}I", stream.read(4 + 4 * dims))
            if (zeros, kind, rank) != (0, UINT8, dims):
                raise UserError(f"{file} is no idx file of {dims}-dimensional uint8 data.")
            yield stream, tuple(shape)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise UserError(f"{file} is no readable idx file ({brief(error)}).") from error


def read_rows(file: Path, stream: IO[bytes], shape: tuple[int, ...]) -> np.ndarray:
    """The next uint8 rows of an open idx file. Raises `UserError` with the row where it breaks off."""
    row_bytes = math.prod(shape[1:])
    data, problem = _read_at_most(stream, shape[0] * row_bytes)
    if len(data) < shape[0] * row_bytes:
        raise UserError(f"{file} breaks off in row {len(data) // row_bytes} (from 0), {problem}.")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def _open(file: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(file)) if file.suffix == ".gz" else file.open("rb")


def _read_at_most(stream: IO[bytes], size: int) -> tuple[bytearray, str]:
    """Up to `size` bytes, and what ended them early; memory grows with what is there, not with the header."""
    data = bytearray()
    try:
        while len(data) < size and (piece := stream.read(min(1 << 20, size - len(data)))):
            data += piece
    except (OSError, EOFError, zlib.error) as error:
        return data, brief(error)
    return data, "end of file"
