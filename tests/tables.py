"""Small image data sets for tests: as Parquet files of the hub, and as folders of files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

NAMES = ["cat", "dog", "owl"]


def pixels(count: int, side: int = 8, channels: int = 3, seed: int = 0) -> np.ndarray:
    """uint8 [count, side, side, channels]."""
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, channels), dtype=np.uint8)


def encoded(array: np.ndarray, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array.squeeze()).save(stream, kind)
    return stream.getvalue()


def parquet(images: Sequence[bytes | None], **columns: Sequence[Any]) -> bytes:
    """A file as `datasets` writes it: column img of images, and others; `label` holds numbers of `NAMES`."""
    import datasets

    kinds: dict[str, Any] = {name: datasets.Value(_kind(values)) for name, values in columns.items()}
    if "label" in kinds and _kind(columns["label"]) == "int64":
        kinds["label"] = datasets.ClassLabel(names=NAMES)
    features = datasets.Features({"img": datasets.Image(), **kinds})
    cells = [{"bytes": image, "path": None} for image in images]
    arrays = [pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))]
    arrays += [pa.array(values) for values in columns.values()]
    stream = io.BytesIO()
    pq.write_table(pa.table(arrays, schema=features.arrow_schema), stream)
    return stream.getvalue()


def _kind(values: Sequence[Any]) -> str:
    value = next(v for v in values if v is not None)
    return {str: "string", int: "int64", float: "float64"}[type(value)]


def folder(root: Path, split: str, counts: dict[str, int], **options: Any) -> Path:
    """`root`/`split`/<class>/<number>.png, so many of each class."""
    for number, (name, count) in enumerate(counts.items()):
        place = root / split / name
        place.mkdir(parents=True, exist_ok=True)
        for index, array in enumerate(pixels(count, seed=100 * number + len(split), **options)):
            (place / f"{index:03}.png").write_bytes(encoded(array))
    return root
