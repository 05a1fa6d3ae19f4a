"""Files on this machine: folders, archives, and the tables in them."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from fedspa.core.errors import UserError, brief
from fedspa.data.idx import BROKEN, idx_tables

if TYPE_CHECKING:
    import datasets

TABLES = (".csv", ".tsv", ".jsonl", ".parquet", ".txt")
JUNK = ("__MACOSX", "__pycache__", "@eaDir", "$RECYCLE.BIN", "lost+found")
"""Folders that a system makes by itself, beside all hidden ones. Some hold thumbnails, which are no images of ours."""


def spelled(text: object) -> str:
    """The text on one line: what cannot be printed, such as a line break in a file's name, as an escape."""
    return str(text) if str(text).isprintable() else repr(str(text))[1:-1]


def fingerprint(path: str, origin: str) -> str:
    """16 hex digits of the names, relative to the folder, and the sizes of all files. Raises `UserError`."""
    (folder, found), digest = listed(path, origin), hashlib.sha256()
    with _reading(origin):
        for file in found:
            size = (folder / file).stat().st_size
            digest.update(f"{file}\0{size}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def listed(path: str, origin: str) -> tuple[Path, list[PurePosixPath]]:
    """A folder, and all files below it that are not hidden, in the order of their paths; of a file, that one alone.

    Raises `UserError` if a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    root, found = unpacked(path, origin), []
    if not root.is_dir():
        return root.parent, [PurePosixPath(root.name)]
    with _reading(origin):
        for folder, folders, names in os.walk(root, onerror=refuse):
            folders[:] = filter(_counts, folders)
            below = PurePosixPath(Path(folder).relative_to(root))
            found += [below / name for name in names if _counts(name)]
    return root, sorted(found, key=str)


@contextmanager
def _reading(origin: str) -> Iterator[None]:
    """Raise `UserError` for a file or folder that cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{origin}: {spelled(error.filename)} cannot be read ({brief(error)}).") from error


def _counts(name: str) -> bool:
    return not (name.startswith(".") or name in JUNK)


def unpacked(path: str, origin: str) -> Path:
    """The file or folder at `path`; of an archive, the folder into which it is unpacked once, in the cache of
    `datasets`. Raises `UserError`, which begins with `origin`, for a broken archive."""
    from datasets import config
    from filelock import FileLock

    file = Path(path).expanduser().resolve()
    endings = tuple(ending for _, some, _ in shutil.get_unpack_formats() for ending in some)
    if not (file.is_file() and file.name.lower().endswith(endings)):
        return file
    try:
        state = f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}"
        key = hashlib.sha256(state.encode()).hexdigest()[:16]
        folder = Path(config.HF_DATASETS_CACHE).expanduser() / "unpacked" / key
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"), tempfile.TemporaryDirectory(dir=folder.parent) as part:
                # shutil leaves out what a zip file would write outside of the folder; tarfile is to refuse it.
                safe: dict[str, Any] = {} if file.suffix.lower() == ".zip" else {"filter": "data"}
                if not folder.is_dir():  # another process may have been faster
                    shutil.unpack_archive(file, Path(part) / "whole", **safe)
                    os.replace(Path(part) / "whole", folder)
    except (*BROKEN, tarfile.TarError, zipfile.BadZipFile) as error:
        raise UserError(f"{origin} cannot be unpacked ({brief(error)}).") from error
    inside = [entry for entry in folder.iterdir() if _counts(entry.name)]
    return inside[0] if len(inside) == 1 and not inside[0].name.startswith("train") else folder


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
                whole = file.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
                lines = [line for line in whole.splitlines() if line.strip()]
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

    splits: names that may be those of splits. Raises `UserError` for other files.
    """
    import datasets

    folder, found = listed(path, origin)
    if idx := idx_tables(folder):
        return idx
    found = [file for file in found if file.suffix.lower() in TABLES and len(file.parts) < 3]
    found = [file for file in found if len(file.parts) == 1] or found
    if not found:
        raise UserError(
            f"{origin} holds no data: it must be a table ({', '.join(TABLES)}), a folder of such tables or of image "
            "files, or an archive of these."
        )
    members: dict[str, list[PurePosixPath]] = {}
    for file in found:
        named = [name for name in splits if file.name.lower().startswith(name.lower())]
        members.setdefault(max(named, key=len, default=""), []).append(file)
    if set(members) == {""} or not unpacked(path, origin).is_dir():
        members = {splits[0]: found}
    members.pop("", None)
    tables = {}
    for split, some in members.items():
        if len({file.parent for file in some}) > 1:
            raise UserError(
                f"{origin} has {split} tables in more than one folder below it: name one of them."
            )
        try:
            tables[split] = datasets.concatenate_datasets([read_table(folder / file) for file in some])
        except ValueError as error:  # columns of other types
            raise UserError(f"{origin}: the {split} tables do not fit together ({brief(error)}).") from error
    return tables
