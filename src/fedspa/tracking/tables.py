"""Tables as CSV files: written row by row, cut back to completed rounds, and read, perhaps while they grow."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspa.core.errors import UserError
from fedspa.core.files import write_whole

if TYPE_CHECKING:
    import numpy as np


class Table:
    """A CSV file with fixed columns. A missing value is blank; an unknown column is an error."""

    def __init__(self, path: Path, columns: Sequence[str], completed: int = 0) -> None:
        """`completed`: go on with the rows of so many rounds; 0: begin anew."""
        if completed:
            _cut_back(path, columns, completed)
        self._file = path.open("a" if completed else "w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, columns, lineterminator="\n")
        if not completed:
            self._writer.writeheader()
            self._file.flush()

    def sync(self) -> None:
        if not self._file.closed:  # as at the end of a run, when other files could not be written
            os.fsync(self._file.fileno())

    def write(self, row: Mapping[str, Any]) -> None:
        self._writer.writerow(row)  # floats as repr, None as blank
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def write_table(path: Path, columns: Mapping[str, Sequence[Any] | np.ndarray]) -> None:
    """Write a whole table; NaN and None are blank."""
    import pandas as pd

    write_whole(path, pd.DataFrame(columns).to_csv(index=False, lineterminator="\n"))


def _cut_back(path: Path, columns: Sequence[str], completed: int) -> None:
    """Cut a table to its rows of the first rounds. Raises `UserError` where it does not have them."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    rows = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline="")))
    if rows and rows[0] != columns:
        raise UserError(
            f"{path} has other columns than this version of fedspa writes: go on with the version that began it."
        )
    kept = list(takewhile(lambda row: row and row[0].isdigit() and int(row[0]) <= completed, rows[1:]))
    if not rows or (path.name != "events.csv" and len(kept) != completed):
        raise UserError(
            f"{path} is shorter than when the run's checkpoint was written: put it back as it was, or start anew "
            "in another folder."
        )
    content = io.StringIO(newline="")
    csv.writer(content, lineterminator="\n").writerows([columns, *kept])
    write_whole(path, content.getvalue())


def read_table(path: Path) -> dict[str, list[Any]]:
    """The columns of a table of numbers: whole numbers where all cells are, else floats; a blank is NaN."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        return {name: _numbers([row[name] for row in rows]) for name in reader.fieldnames or ()}


def _numbers(cells: list[str | None]) -> list[Any]:
    """The cells of a column with all their digits."""
    try:
        return [int(cell or "") for cell in cells]
    except ValueError:
        return [float(cell or "nan") for cell in cells]


class Tail:
    """Reads the rows that are new in a table."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self._columns: list[str] | None = None

    def rows(self) -> list[dict[str, str]]:
        """The rows that are complete and were not read before; none where there is no table yet."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            content = file.read()
        content = content[: content.rfind(b"\n") + 1]
        self._read += len(content)
        rows = list(csv.reader(io.StringIO(content.decode(), newline="")))
        if self._columns is None and rows:
            self._columns = rows.pop(0)
        return [dict(zip(self._columns or (), row, strict=True)) for row in rows]
