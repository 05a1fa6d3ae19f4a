"""Tables of images and labels, as the library `datasets` opens them: of the hub, or of a folder of image files."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedspa.core.errors import UserError, brief, nearest
from fedspa.data.image_files import spelled
from fedspa.data.pictures import BadPicture, Fit, opened

if TYPE_CHECKING:
    import datasets

ROWS_AT_ONCE = 100
PROGRESS_SECONDS = 10.0


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are used."""

    image: str
    label: str
    group: str | None = None


@dataclass(frozen=True)
class Table:
    """One split of a data set."""

    data: datasets.Dataset
    where: str
    """What it is, for sentences: "dataset.name=org/name, split train"."""
    columns: Columns

    def __len__(self) -> int:
        return len(self.data)

    def encoded(self, rows: np.ndarray) -> Iterator[bytes]:
        """The encoded image of each row. Raises `UserError` with the row that cannot be read."""
        column = self.columns.image
        chosen = self.data.select_columns([column]).with_format("arrow").select(rows)
        for first in range(0, len(rows), ROWS_AT_ONCE):
            cells = chosen[first : first + ROWS_AT_ONCE].column(column).to_pylist()
            for row, cell in zip(rows[first : first + ROWS_AT_ONCE], cells, strict=True):
                try:
                    yield cell["bytes"] or _file_bytes(cell["path"])
                except (OSError, TypeError) as error:  # the file is gone, or the cell is empty
                    raise UserError(
                        f"{self.place(row)}: its image cannot be read ({brief(error)})."
                    ) from error

    def pixels(self, rows: np.ndarray, fit: Fit) -> np.ndarray:
        """The decoded images uint8 [n, side, side, channels] of rows int64 [n]; says how far it is, if that takes long.

        Raises `UserError` with the row of an image that is broken or does not fit.
        """
        pixels = np.empty((len(rows), fit.side, fit.side, fit.channels), dtype=np.uint8)
        said = time.monotonic()
        for index, (row, encoded) in enumerate(zip(rows, self.encoded(rows), strict=True)):
            try:
                pixels[index] = fit.pixels(opened(encoded))
            except BadPicture as fault:
                raise UserError(f"{self.place(row)}: {fault}.") from fault
            if time.monotonic() - said > PROGRESS_SECONDS:
                print(
                    f"{self.where}: {index + 1:,} of {len(rows):,} images are read.",
                    file=sys.stderr,
                    flush=True,
                )
                said = time.monotonic()
        return pixels

    def labels(self) -> np.ndarray:
        """The published label of each row, int64 [N] or str [N]. Raises `UserError` where one is missing."""
        return self._values(self.columns.label)

    def groups(self) -> np.ndarray | None:
        """The value of the group column in each row, str [N]; None without one, or where this split has none."""
        column = self.columns.group
        if column is None or column not in self.data.column_names:
            return None
        if names := class_names(self.data, column):
            return np.array([names[value] for value in self._values(column)], dtype=object)
        return np.array([str(value) for value in self._values(column)], dtype=object)

    def place(self, row: int) -> str:
        """Where a row lies, for sentences."""
        path = (
            self.data.select_columns([self.columns.image])
            .with_format("arrow")[int(row)]
            .column(0)[0]["path"]
            .as_py()
        )
        return f"{self.where}, row {row} (from 0)" + (f", {spelled(path)}" if path else "")

    def _values(self, column: str) -> np.ndarray:
        values = self.data.select_columns([column]).with_format("arrow")[:].column(0).to_pylist()
        if None in values:
            raise UserError(f"{self.place(values.index(None))}: the column {column} is empty there.")
        if values and isinstance(values[0], str):
            return np.array(values, dtype=object)
        return np.array(values).astype(np.int64)


def _file_bytes(path: str) -> bytes:
    """Of a regular file: a device would be read for ever. Raises `OSError`, and `TypeError` without a path."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is no file")
    return Path(path).read_bytes()


def class_names(data: datasets.Dataset, column: str) -> list[str]:
    """The names of a ClassLabel column; [] of any other."""
    return list(getattr(data.features[column], "names", None) or [])


def chosen_columns(
    data: datasets.Dataset,
    where: str,
    image: str | None,
    label: str | None,
    group: str | None,
    grouping: str,
) -> Columns:
    """The columns that the settings name, or, where they name none, the only ones that can be meant.

    grouping: the setting that names the column `group`. Raises `UserError` with the nearest valid name.
    """
    import datasets as library

    kinds = data.features
    images = [name for name, kind in kinds.items() if isinstance(kind, library.Image)]
    labels = [name for name, kind in kinds.items() if isinstance(kind, library.ClassLabel)]
    able = [name for name, kind in kinds.items() if _is_discrete(kind)]
    if image is None:
        image = _only(images, "image", "an image column", where, data.column_names)
    elif image not in images:
        raise _no_such(f"dataset.image={image}", "image column", image, images, where, kinds)
    if label is None:
        label = _only(labels, "label", "a column of class labels", where, able)
    elif label not in able:
        raise _no_such(
            f"dataset.label={label}", "column of whole numbers or names", label, able, where, kinds
        )
    if group is not None and group not in able:
        raise _no_such(f"{grouping}={group}", "column of whole numbers or names", group, able, where, kinds)
    return Columns(image, label, group)


def _is_discrete(kind: Any) -> bool:
    import datasets as library

    numbers = ("int", "uint", "bool", "string", "large_string")
    return isinstance(kind, library.ClassLabel) or (
        isinstance(kind, library.Value) and kind.dtype.startswith(numbers)
    )


def _only(found: Sequence[str], setting: str, what: str, where: str, others: Sequence[str]) -> str:
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"{where} has more than one that could be meant: set dataset.{setting} to {_listed(found)}."
        )
    raise UserError(f"{where} has no {what.partition(' ')[2]}: set dataset.{setting} to {_listed(others)}.")


def _no_such(
    setting: str, what: str, name: str, valid: Sequence[str], where: str, kinds: dict[str, Any]
) -> UserError:
    if name in kinds:
        kind = getattr(kinds[name], "dtype", None) or type(kinds[name]).__name__
        return UserError(f"{setting} is no {what} of {where} (it holds {kind}): {nearest(name, valid)}.")
    return UserError(f"{setting} is no column of {where}: {nearest(name, valid)}.")


def _listed(names: Sequence[str]) -> str:
    return " or ".join(names) if names else "a column, of which there is none"
