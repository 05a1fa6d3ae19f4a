"""IDX files, the format of MNIST and its relatives, as tables of images."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedspa.core.errors import UserError, brief

if TYPE_CHECKING:
    import datasets

SPLITS = (("train", "train"), ("test", "t10k"), ("test", "test"))
"""The beginnings of the names of files: MNIST and Fashion-MNIST call their test files t10k, EMNIST test."""
BROKEN = (OSError, EOFError, ValueError, zlib.error, struct.error)
"""Raised on broken files."""
UINT8 = 0x0800
"""The first four bytes of a file of uint8, but for the number of dimensions."""


def idx_tables(root: Path) -> dict[str, datasets.Dataset]:
    """The IDX files of a folder: each image as PGM, its pixels behind a short header. Empty without such files."""
    import datasets
    import pyarrow as pa

    tables: dict[str, datasets.Dataset] = {}
    for split, name in SPLITS:
        kinds = ("images?idx3", "labels?idx1")
        images, labels = (sorted(root.glob(f"*{name}-{kind}-ubyte*")) for kind in kinds)
        if not (images and labels):
            continue
        pixels, numbers = idx_array(images[0], 3), idx_array(labels[0], 1)
        if len(pixels) != len(numbers):
            raise UserError(f"{images[0]} holds {len(pixels)} images, but {labels[0]} {len(numbers)} labels.")
        head = b"P5 %d %d 255\n" % pixels.shape[:0:-1]
        cells = [{"bytes": head + image.tobytes(), "path": None} for image in pixels]
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        table = pa.table({"image": pa.array(cells, kind), "label": numbers.astype(np.int64)})
        tables.setdefault(split, datasets.Dataset(table).cast_column("image", datasets.Image()))
    return tables


def idx_array(file: Path, rank: int) -> np.ndarray:
    """An IDX file, gzipped or not: uint8 of so many dimensions.

    Raises `UserError` for another file, and with the row where it breaks off.
    """
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        magic, *shape = struct.unpack_from(f">{1 + rank}I", data)
        if magic != UINT8 + rank:
            raise ValueError(f"its data is not uint8 of {rank} dimensions")
        head, row_bytes = 4 + 4 * rank, max(math.prod(shape[1:]), 1)
        if (rows := (len(data) - head) // row_bytes) < shape[0]:
            raise ValueError(f"it breaks off in row {rows} (from 0)")
        return np.frombuffer(data, np.uint8, math.prod(shape), head).reshape(shape)
    except BROKEN as error:
        raise UserError(f"{file} is no readable idx file ({brief(error)}).") from error
