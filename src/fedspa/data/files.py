"""Files on this machine as tables: tables in files, image files in folders, IDX files, and archives of any of them."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import shutil
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedspa.core.errors import UserError, brief

if TYPE_CHECKING:
    import datasets
    import pandas as pd

TABLES = (".csv", ".tsv", ".jsonl", ".parquet", ".txt")
IDX_SPLITS = (("train", "train"), ("test", "t10k"), ("test", "test"))
"""MNIST and Fashion-MNIST call their test files t10k, EMNIST test."""
UINT8 = 0x08
JUNK = ("__MACOSX", "__pycache__", "@eaDir", "$RECYCLE.BIN", "lost+found")
"""Folders that a system makes by itself, beside all hidden ones. Some hold thumbnails, which are no images of ours."""
CLASS, FOLDER = "class_folder", "folder"
"""Columns of an image file: the folder of its class, and the path of folders between that one and the image."""
NAMES = ("file_name", "filename", "file", "image", "path", "id")
"""The column of a table that names the images is the first of these that there is."""
BROKEN = (OSError, EOFError, ValueError, zlib.error, struct.error, tarfile.TarError, zipfile.BadZipFile)
"""Raised on broken files; of pandas and Arrow these are ValueErrors."""

Parts = tuple[str, ...]
"""The path of a file below a folder."""


def spelled(text: object) -> str:
    """The text on one line: what cannot be printed, such as a line break in a file's name, as an escape."""
    return str(text) if str(text).isprintable() else repr(str(text))[1:-1]


def fingerprint(path: str, origin: str) -> str:
    """16 hex digits of the names, relative to the folder, and the sizes of all files. Raises `UserError`."""
    root, digest = unpacked(path, origin), hashlib.sha256()
    for parts in files_below(root, origin):
        try:
            size = (root.joinpath(*parts) if root.is_dir() else root).stat().st_size
        except OSError as error:
            raise UserError(
                f"{origin}: {spelled('/'.join(parts))} cannot be read ({brief(error)})."
            ) from error
        digest.update(f"{'/'.join(parts)}\0{size}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def unpacked(path: str, origin: str) -> Path:
    """The file or folder at `path`; of an archive, the folder into which it is unpacked once, in the cache of
    `datasets`. Raises `UserError`, which begins with `origin`, where there is no sound archive."""
    from datasets import config

    file = Path(path).expanduser().resolve()
    endings = tuple(ending for _, some, _ in shutil.get_unpack_formats() for ending in some)
    if not (file.is_file() and file.name.lower().endswith(endings)):
        return file
    try:
        key = hashlib.sha256(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}".encode()).hexdigest()[
            :16
        ]
        folder = Path(config.HF_DATASETS_CACHE).expanduser() / "unpacked" / key
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as part:
                # shutil leaves out what a zip file would write outside of the folder; tarfile is to refuse it.
                safe: dict[str, Any] = {} if file.suffix.lower() == ".zip" else {"filter": "data"}
                shutil.unpack_archive(file, Path(part) / "whole", **safe)
                if not folder.is_dir():  # another process may have been faster
                    os.replace(Path(part) / "whole", folder)
    except BROKEN as error:
        raise UserError(f"{origin} is no sound archive ({brief(error)}).") from error
    inside = [entry for entry in folder.iterdir() if _counts(entry.name)]
    return inside[0] if len(inside) == 1 and not inside[0].name.startswith("train") else folder


def _counts(name: str) -> bool:
    return not (name.startswith(".") or name in JUNK)


def files_below(root: Path, origin: str) -> list[Parts]:
    """All files of a folder that are not hidden, in the order of their paths; of a file, that one.

    Raises `UserError` where a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"{origin} cannot be read ({brief(error)}: {spelled(error.filename)}).") from error

    found: list[Parts] = [] if root.is_dir() else [(root.name,)]
    for folder, folders, names in os.walk(root, onerror=refuse if root.is_dir() else None):
        folders[:] = filter(_counts, folders)
        found += [(*Path(folder).relative_to(root).parts, name) for name in names if _counts(name)]
    return sorted(found, key="/".join)


def read_table(file: Path, text: Sequence[str] = ()) -> datasets.Dataset:
    """A table in a file. text: columns that are text even where they look like numbers. Raises `UserError` for a file
    that cannot be read."""
    import datasets
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        match file.suffix.lower():
            case ".parquet":
                table = pq.ParquetFile(file).read()
                table.validate(full=True)
                data = datasets.Dataset(table)
                for name, kind in zip(table.schema.names, table.schema.types, strict=True):
                    encoded = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
                    if (encoded or pa.types.is_binary(kind)) and not isinstance(
                        data.features[name], datasets.Image
                    ):
                        data = data.cast_column(name, datasets.Image())
                return data
            case ".jsonl":
                frame = pd.read_json(file, lines=True)
            case ".txt":
                lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
                frame = pd.DataFrame({"text": lines, "file": file.stem})
            case ending:
                frame = pd.read_csv(
                    file, sep="\t" if ending == ".tsv" else ",", dtype=dict.fromkeys(text, str)
                )
        return datasets.Dataset.from_pandas(frame.convert_dtypes(), preserve_index=False)
    except Exception as error:  # the operating system, pandas and Arrow raise of many kinds
        what = "is no readable Parquet file" if file.suffix == ".parquet" else "cannot be read as a table"
        raise UserError(f"{spelled(file)} {what} ({brief(error)}).") from error


def open_tables(path: str, origin: str, splits: Sequence[str]) -> dict[str, datasets.Dataset]:
    """The tables in the files at `path` by split. A file belongs to the split that its name begins with; where no name
    begins so, all files are the first split's.

    splits: names that may be those of splits. Raises `UserError` for what is no table.
    """
    import datasets

    root = unpacked(path, origin)
    if idx := _idx_tables(root):
        return idx
    found = [
        parts for parts in files_below(root, origin) if parts[-1].lower().endswith(TABLES) and len(parts) < 3
    ]
    found = [parts for parts in found if len(parts) == 1] or found
    if not found:
        raise UserError(
            f"{origin} holds no data: it must be a table ({', '.join(TABLES)}), a folder of such tables or of image "
            "files, or an archive of these."
        )
    members: dict[str, list[Parts]] = {}
    for parts in found:
        named = [name for name in splits if parts[-1].lower().startswith(name.lower())]
        members.setdefault(max(named, key=len, default=""), []).append(parts)
    if set(members) == {""} or not root.is_dir():
        members = {splits[0]: found}
    members.pop("", None)
    tables = {}
    for split, some in members.items():
        if len({parts[:-1] for parts in some}) > 1:
            raise UserError(
                f"{origin} has {split} tables in more than one folder below it: name one of them."
            )
        pieces = [read_table(root.joinpath(*parts) if root.is_dir() else root) for parts in some]
        try:
            tables[split] = datasets.concatenate_datasets(pieces)
        except ValueError as error:  # columns of other types
            raise UserError(f"{origin}: the {split} tables do not fit together ({brief(error)}).") from error
    return tables


def _idx_tables(root: Path) -> dict[str, datasets.Dataset]:
    """The IDX files of a folder: images as PGM, which costs a header a piece. Empty where there are none."""
    import datasets
    import pyarrow as pa

    tables: dict[str, datasets.Dataset] = {}
    for split, name in IDX_SPLITS:
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
        zeros, kind, dims, *shape = struct.unpack_from(f">HBB{rank}I", data)
    except BROKEN as error:
        raise UserError(f"{file} is no readable idx file ({brief(error)}).") from error
    if (zeros, kind, dims) != (0, UINT8, rank):
        raise UserError(f"{file} is no idx file of {rank}-dimensional uint8 data.")
    head, row_bytes = 4 + 4 * rank, max(math.prod(shape[1:]), 1)
    if (rows := (len(data) - head) // row_bytes) < shape[0]:
        raise UserError(f"{file} breaks off in row {rows} (from 0), end of file.")
    return np.frombuffer(data, np.uint8, math.prod(shape), head).reshape(shape)


def open_images(
    path: str, origin: str, splits: Sequence[str], label: str | None
) -> dict[str, datasets.Dataset]:
    """Image files as tables by split: the file, its class, its folder, and what a table beside the images says of it.
    The same as `open_tables` where there are no image files.

    The splits are folders of these names, if one has the first name. label: the column of the labels; None for the
    folders. Raises `UserError` for images in no class.
    """
    import datasets
    import pandas as pd
    from datasets.packaged_modules.imagefolder.imagefolder import IMAGE_EXTENSIONS

    root = unpacked(path, origin)
    found = files_below(root, origin) if root.is_dir() else []
    images = [parts for parts in found if parts[-1].lower().endswith(tuple(IMAGE_EXTENSIONS))]
    if not images:
        return open_tables(path, origin, splits)
    for name in map("/".join, images):
        if name != name.encode(errors="ignore").decode():
            raise UserError(
                f"{origin} holds an image whose name is not UTF-8, {spelled(name)}: rename it, as "
                "convmv -f latin1 -t utf8 does."
            )
    depth = int(any(parts[0] == splits[0] for parts in images if len(parts) > 1))
    if depth:
        images = [parts for parts in images if parts[0] in splits or len(parts) == 1]
    columns = _said_of(images, root, [parts for parts in found if parts[-1].lower().endswith(TABLES)])
    in_classes = label is None and (columns.empty or any(len(parts) > depth + 1 for parts in images))
    for parts in images:
        if (in_classes and len(parts) <= depth + 1) or len(parts) <= depth:
            raise UserError(
                f"{origin} holds an image that lies in no class, {spelled('/'.join(parts))}: put it into the folder of "
                "its class, take it out, or name the column of its label in a table by dataset.label."
            )
        if in_classes and not depth and parts[0].lower() in ("train", "training", *splits[1:]):
            raise UserError(
                f"{origin} holds the folder {parts[0]}, which looks like a split and would be a class: name the splits "
                "with dataset.train_split and dataset.test_split, or rename it."
            )
    tables = {}
    try:
        if in_classes:
            columns[CLASS] = [parts[depth] for parts in images]
        columns["image"] = [str(root.joinpath(*parts)) for parts in images]
        if FOLDER not in columns:  # where it is in the metadata, that is meant
            columns[FOLDER] = pd.array(
                ["/".join(parts[depth + in_classes : -1]) or None for parts in images], "string"
            )
        for split in sorted({parts[0] for parts in images}) if depth else splits[:1]:
            rows = columns[[not depth or parts[0] == split for parts in images]]
            table = datasets.Dataset.from_pandas(rows, preserve_index=False)
            tables[split] = table.cast_column("image", datasets.Image())
    except Exception as error:  # Arrow, of names that are not UTF-8 and of columns of mixed types
        raise UserError(f"{origin} has a name or value that no table can hold ({brief(error)}).") from error
    return tables


def _said_of(images: Sequence[Parts], root: Path, tables: Sequence[Parts]) -> pd.DataFrame:
    """A line an image, of what the tables say: those called metadata or, without any, the only one in the folder.

    They name an image by its path from the table's own folder; its name, or that without the ending, will do. Raises
    `UserError` for a table without such a column, and for an image that is named twice or is not there.
    """
    import pandas as pd

    known: dict[str, set[str]] = {}
    for parts in images:
        for name in (
            "/".join(parts),
            parts[-1],
            "/".join(parts).rpartition(".")[0],
            parts[-1].rpartition(".")[0],
        ):
            known.setdefault(name, set()).add("/".join(parts))
    lines = [pd.DataFrame()]
    metadata = [parts for parts in tables if parts[-1].startswith("metadata.")]
    others = [parts for parts in tables if len(parts) == 1 and not parts[0].endswith(".txt")]
    for parts in metadata or others[: len(others) == 1]:
        file = root.joinpath(*parts)
        table = read_table(file, NAMES).to_pandas().convert_dtypes()
        column = next((name for name in NAMES if name in table), None)
        if column is None:
            raise UserError(
                f"{spelled(file)} has no column {NAMES[0]} (or {', '.join(NAMES[1:])}) of the images' names."
            )
        below = [os.path.normpath("/".join([*parts[:-1], str(name)])) for name in table.pop(column)]
        named = [known.get(name) or known.get(os.path.basename(name)) or () for name in below]
        for name, matches in zip(below, named, strict=True):
            if len(matches) != 1:
                which = "more than one such image" if matches else "no such image"
                raise UserError(
                    f"{spelled(file)} names {spelled(name)}, but there is {which} in {spelled(root)}."
                )
        table.index = pd.Index([next(iter(matches)) for matches in named])
        lines.append(table)
    joined = pd.concat(lines)
    for name in joined.index[joined.index.duplicated()][:1]:
        raise UserError(f"{spelled(root)}: the metadata has more than one line for {spelled(name)}.")
    return joined.reindex(["/".join(parts) for parts in images])
