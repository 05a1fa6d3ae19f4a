"""The files below a folder of images, sorted into images, metadata and others. Looks at names and sizes only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedspa.core.errors import UserError, brief

if TYPE_CHECKING:
    import pandas

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
JUNK = ("__MACOSX", "__pycache__", "@eaDir", "$RECYCLE.BIN", "lost+found")
"""Folders that a system makes by itself, beside all hidden ones. Some hold thumbnails, which are no images of ours."""


@dataclass(frozen=True)
class Listing:
    """All files of a folder that are not hidden, by their parts below it, in the order of their paths."""

    root: Path
    images: list[tuple[str, ...]]
    metadata: list[tuple[str, ...]]
    others: list[tuple[str, ...]]

    @classmethod
    def of(cls, root: Path, origin: str) -> Listing:
        """Raises `UserError` where a folder cannot be read, or where the name of an image is not UTF-8.

        origin: the setting that names the folder, for error sentences.
        """
        from datasets.packaged_modules.imagefolder.imagefolder import IMAGE_EXTENSIONS

        found = cls(root, [], [], [])
        try:
            for parts in _files(str(root)):
                if os.path.splitext(parts[-1])[1].lower() in IMAGE_EXTENSIONS:
                    _check_name(parts, origin)
                    found.images.append(parts)
                else:
                    (found.metadata if parts[-1] in METADATA else found.others).append(parts)
        except OSError as error:
            raise UserError(f"{origin} cannot be read ({brief(error)}: {error.filename}).") from error
        for kind in (found.images, found.metadata, found.others):
            kind.sort(key="/".join)
        return found

    def path(self, parts: Sequence[str]) -> str:
        return str(self.root.joinpath(*parts))

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Path below the folder and bytes of each file that decides the data. Raises `UserError` for a dead link."""
        # A folder's own files come before its folders, so that recorded fingerprints stay valid.
        for parts in sorted(
            self.images + self.metadata, key=lambda p: [*((1, name) for name in p[:-1]), (0, p[-1])]
        ):
            try:
                yield "/".join(parts), os.stat(self.path(parts)).st_size
            except OSError as error:
                raise UserError(f"{spelled(self.path(parts))} cannot be read ({brief(error)}).") from error

    def columns(self) -> pandas.DataFrame:
        """What the metadata files say of each image, in the order of `images`; no columns without such files.

        A value is missing where no line names the image. Raises `UserError` for a file that is no table, has no
        column file_name, or names an image twice or one that is not there.
        """
        import pandas as pd

        lines: list[pd.DataFrame] = []
        known = {"/".join(parts) for parts in self.images}
        for parts in self.metadata:
            where = spelled(self.path(parts))
            table = _table(self.path(parts), where)
            if "file_name" not in table:
                raise UserError(f"{where} has no column file_name, which must say whose line each is.")
            below = "".join(f"{part}/" for part in parts[:-1])
            table.index = pd.Index([os.path.normpath(f"{below}{name}") for name in table.pop("file_name")])
            missing = [name for name in table.index if name not in known]
            if missing:
                raise UserError(
                    f"{where} names {spelled(missing[0])}, but there is no such image in {self.root}."
                )
            lines.append(table)
        if not lines:
            return pd.DataFrame(index=range(len(self.images)))
        joined = pd.concat(lines)
        twice = joined.index[joined.index.duplicated()]
        if len(twice):
            raise UserError(f"{self.root}: the metadata has more than one line for {spelled(twice[0])}.")
        return joined.reindex(["/".join(parts) for parts in self.images]).convert_dtypes()


def spelled(text: str) -> str:
    """The text on one line: what cannot be printed, such as a line break in a file's name, as an escape."""
    return text if text.isprintable() else repr(text)[1:-1]


def _files(folder: str, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The parts below `folder` of every file in it; follows links, but not back into a folder that it comes from."""
    real = os.path.realpath(folder)
    if real in above:
        return
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.name.startswith("."):
                continue
            if not entry.is_dir():
                yield (entry.name,)
            elif entry.name not in JUNK:
                yield from ((entry.name, *parts) for parts in _files(entry.path, (*above, real)))


def _check_name(parts: tuple[str, ...], origin: str) -> None:
    raw = os.fsencode("/".join(parts))
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        shown = raw.decode("utf-8", "backslashreplace")
        raise UserError(
            f"{origin} holds an image whose name is not UTF-8, {shown}: rename it, as convmv -f latin1 -t utf8 does."
        ) from error


def _table(path: str, where: str) -> pandas.DataFrame:
    import pandas as pd

    try:
        if path.endswith(".csv"):
            return pd.read_csv(path, dtype={"file_name": str})
        return pd.read_json(path, lines=True) if path.endswith(".jsonl") else pd.read_parquet(path)
    except (OSError, ValueError) as error:  # of broken tables, pandas and Arrow raise ValueErrors
        raise UserError(f"{where} cannot be read as a table ({brief(error)}).") from error
