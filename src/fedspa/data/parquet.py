"""Encoded images in Arrow tables, as the Hugging Face hub keeps them: found, checked and decoded.

The layout: files `train*.parquet` and `test*.parquet` in one folder (or in one folder below it, as `data/`),
possibly in several shards; an image column struct{bytes, path} and an integer label column.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedspa.core.errors import UserError, brief, nearest

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_AT_ONCE = 1000

COLOUR_MODES = {1: ("1", "L"), 3: ("1", "L", "P", "RGB")}
"""Pillow's image modes that turn into so many channels without loss."""


FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")
"""Of Pillow's formats those that hold images and nothing else: to read an EPS, it would run another program."""

LARGEST_LABEL = 2**63 - 1
"""Of int64; a file may hold uint64."""

BYTES_A_PIXEL, BYTES_AN_IMAGE = 16, 1 << 16
"""More than any honest encoding of an image takes: a column that unpacks to more is a bomb, and is not unpacked."""


@dataclass(frozen=True)
class Shard:
    """One table of encoded images. `tables` yields it in pieces, in row order."""

    where: str
    rows: int
    schema: pa.Schema
    tables: Iterable[pa.Table | pa.RecordBatch]


def folder_shards(folder: Path, split: str, columns: list[str], pixels: int) -> list[Shard]:
    """The shards of one split of a folder, in the order of their names. Raises `UserError` if it has none.

    `pixels`: of an image, its channels counted; a shard whose columns unpack to absurdly more is refused.
    """
    if not folder.is_dir():
        raise UserError(f"dataset.path={folder} is no folder: it must hold train*.parquet and test*.parquet.")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f"dataset.path={folder} cannot be read: you have no permission to.")
    found = {name: _files(folder, name) for name in ("train", "test")}
    if not found[split]:
        held = " ".join(f"only {name}*.parquet" for name, files in found.items() if files) or "no such file"
        raise UserError(
            f"dataset.path={folder} has no {split} split: it must hold {split}*.parquet, directly or in one "
            f"folder below it, and holds {held}."
        )
    if len({file.parent for file in found[split]}) > 1:
        raise UserError(
            f"dataset.path={folder} has {split}*.parquet in more than one folder below it: name one of them."
        )
    return [_open(file, columns, pixels * BYTES_A_PIXEL + BYTES_AN_IMAGE) for file in found[split]]


def _files(folder: Path, split: str) -> list[Path]:
    return sorted(folder.glob(f"{split}*.parquet")) or sorted(folder.glob(f"*/{split}*.parquet"))


def _open(file: Path, columns: list[str], largest_row: int) -> Shard:
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file)
        groups = [parquet.metadata.row_group(index) for index in range(parquet.metadata.num_row_groups)]
        for group in groups:
            for part in map(group.column, range(group.num_columns)):
                if part.path_in_schema.partition(".")[0] in columns:
                    unpacked, bound = part.total_uncompressed_size, (group.num_rows + 1) * largest_row
                    if unpacked > bound:
                        raise ValueError(
                            f"{group.num_rows} rows of {part.path_in_schema} unpack to {unpacked} bytes, more than "
                            f"{bound}"
                        )
    except Exception as error:  # the operating system and Arrow raise of many kinds
        raise UserError(f"{file} is no readable Parquet file ({brief(error)}).") from error
    tables = parquet.iter_batches(ROWS_AT_ONCE, columns=columns)
    return Shard(str(file), parquet.metadata.num_rows, parquet.schema_arrow, tables)


def decode_shard(shard: Shard, image: str, label: str, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Decode the first rows of a shard into `pixels` uint8 [n, H, W, C] and `labels` int64 [n], in place.

    In one thread: two of them fight for the interpreter's lock and take twice as long for small images.
    """
    _check_columns(shard, image, label)
    side, channels = pixels.shape[1], pixels.shape[3]
    row = -1
    for row, (encoded, number) in enumerate(itertools.islice(_rows(shard, image, label), len(labels))):
        try:
            pixels[row] = decode_image(encoded, side, channels)
        except Exception as error:  # Pillow raises of many kinds on broken bytes
            raise UserError(f"{shard.where}, row {row} (from 0): broken image, {brief(error)}.") from error
        if number is None:
            raise UserError(f"{shard.where}, row {row} (from 0): the label is missing.")
        if number > LARGEST_LABEL:
            raise UserError(f"{shard.where}, row {row} (from 0): the label {number} is absurd.")
        labels[row] = number
    if row + 1 < len(labels):
        raise UserError(f"{shard.where} breaks off after {row + 1} of its {shard.rows} rows.")


def _rows(shard: Shard, image: str, label: str) -> Iterator[tuple[bytes | None, int | None]]:
    """The encoded image and the label of each row."""
    row = 0
    try:
        for table in shard.tables:
            images = (cell and cell["bytes"] for cell in table.column(image).to_pylist())
            yield from zip(images, table.column(label).to_pylist(), strict=True)
            row += len(table)
    except Exception as error:  # Arrow raises of many kinds on broken files
        raise UserError(f"{shard.where} is corrupt from row {row} (from 0) on, {brief(error)}.") from error


def _check_columns(shard: Shard, image: str, label: str) -> None:
    import pyarrow as pa

    for setting, column in (("image", image), ("label", label)):
        if column not in shard.schema.names:
            raise UserError(
                f"dataset.{setting}={column} is no column of {shard.where}: "
                f"{nearest(column, shard.schema.names)}."
            )
    kind = shard.schema.field(image).type
    if not pa.types.is_struct(kind) or kind.get_field_index("bytes") < 0:
        raise UserError(
            f"dataset.image={image} in {shard.where} is {kind}: it must be struct{{bytes, path}}."
        )
    kind = shard.schema.field(label).type
    if not pa.types.is_integer(kind):
        raise UserError(f"dataset.label={label} in {shard.where} is {kind}: it must be an integer.")


def decode_image(encoded: bytes | None, side: int, channels: int) -> np.ndarray:
    """One encoded image as uint8 [side, side, channels]. Raises `ValueError`, or whatever Pillow does."""
    from PIL import Image

    if not encoded:
        raise ValueError("it holds no bytes")
    with Image.open(io.BytesIO(encoded), formats=FORMATS) as picture:
        if picture.size != (side, side):  # known from the header, before memory is taken
            raise ValueError(f"it is {picture.width} x {picture.height} pixels, dataset.image_size={side}")
        if picture.mode not in COLOUR_MODES[channels]:
            raise ValueError(f"its colour mode is {picture.mode}, dataset.channels={channels}")
        wanted = "L" if channels == 1 else "RGB"
        pixels = np.asarray(picture if picture.mode == wanted else picture.convert(wanted))
    return pixels.reshape(side, side, channels)
