"""The idx files in which MNIST and its descendants are published, gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np

from fedspa.data.hub import HubImages
from fedspa.data.parquet import brief
from fedspa.data.source import ImageSet
from fedspa.errors import UserError

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
        pixels, labels = read_idx(files[0], 3), read_idx(files[1], 1)
        if len(pixels) != len(labels):
            raise UserError(f"{files[0]} holds {len(pixels)} images, but {files[1]} {len(labels)} labels.")
        rows = self.rows_to_read(split, len(labels), f"{files[0]}")
        return self.image_set(pixels[:rows, :, :, None], labels[:rows].astype(np.int64))


def find_idx(folder: Path, split: str) -> tuple[Path, Path] | None:
    """The image and the label file of a split, or None where the folder lacks either."""
    for name in SPLIT_NAMES[split]:
        images = sorted(folder.glob(f"*{name}-images?idx3-ubyte*"))
        labels = sorted(folder.glob(f"*{name}-labels?idx1-ubyte*"))
        if images and labels:
            return images[0], labels[0]
    return None


def read_idx(file: Path, dims: int) -> np.ndarray:
    """The uint8 array of an idx file, of so many dimensions; a broken file is refused by name and row."""
    with _open(file) as stream:
        try:
            header = stream.read(4 + 4 * dims)
            zeros, kind, rank, *shape = struct.unpack(f">HBB{dims}I", header)
        except (OSError, EOFError, zlib.error, struct.error) as error:
            raise UserError(f"{file} is no idx file ({brief(error)}).") from error
        if (zeros, kind, rank) != (0, UINT8, dims):
            raise UserError(
                f"{file} is no idx file of {dims}-dimensional uint8 data (header {header.hex()})."
            )
        row_bytes = math.prod(shape[1:])
        data, problem = _read_at_most(stream, shape[0] * row_bytes)
    if len(data) < shape[0] * row_bytes:
        raise UserError(
            f"{file} breaks off in row {len(data) // row_bytes} (from 0) of the {shape[0]} that its header "
            f"declares ({problem})."
        )
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
