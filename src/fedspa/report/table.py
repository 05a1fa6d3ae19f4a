"""A table of a report: what its cells show, and the numbers behind them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from fedspa.report.numbers import Seeds
from fedspa.report.study import Row, Setting

NO_RUN = "missing"
"""The text of a cell that has no finished run."""
NO_VALUE = "\u2013"
"""The text of a cell that cannot have a value."""
SIGNS = {
    f"^{NO_VALUE}$": f"\u201c{NO_VALUE}\u201d: there is no such model, or no count.",
    f"^{NO_RUN}$": f"\u201c{NO_RUN}\u201d: there is no finished run.",
    "^>": "> and a number of rounds: not every seed got there within these rounds; (1/3): 1 of 3 seeds did.",
    r"^[^>].*\(\d+/\d+\)": "(n/m): n of m clients have such a model; a local one needs a client update.",
    r"\[": "[2 seeds]: fewer seeds than the study has.",
}
"""The meaning of signs in cells, by an expression that finds the sign."""


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and the numbers behind it."""

    text: str
    seeds: Seeds | None = None
    """One number of each seed, with all digits."""
    rank: float | None = None
    """The number as it is shown, so that cells that look equal are equally good; None: the cell is no candidate."""
    reached: int | None = None
    """The number of seeds that reached an accuracy."""


@dataclass(frozen=True)
class Column:
    """A column of a table, and its place in results.csv."""

    setting: Setting
    name: str
    cell: Callable[[Row, str], Cell]
    """The cell of a row and, in tables with a line for each kind of model, that kind."""
    best: Literal["high", "low", ""] = ""
    """Which number is bold."""
    quantity: str = ""
    """The name in results.csv; "" for a column that is not there."""
    unit: str = ""
    kind: str = ""
    target: str = ""
    group: str = ""
    """The heading that neighbours share; the setting's partition unless given."""

    @property
    def heading(self) -> str:
        return self.group or self.setting.split


@dataclass(frozen=True)
class Line:
    """A line of a table: its label, the row of the study and the kind of model, "" where columns say it."""

    label: str
    row: Row
    kind: str
    cells: list[Cell]


@dataclass(frozen=True)
class Table:
    """A table. `name` is unique in a report: letters, digits and dashes."""

    name: str
    title: str
    caption: str
    columns: list[Column]
    lines: list[Line]

    @classmethod
    def make(
        cls, name: str, title: str, caption: str, columns: list[Column], rows: Sequence[tuple[str, Row, str]]
    ) -> Table:
        """Compute the cells, and explain the signs in them. `rows`: the label, row and kind of each line."""
        lines = [
            Line(label, row, kind, [column.cell(row, kind) for column in columns])
            for label, row, kind in rows
        ]
        texts = {cell.text for line in lines for cell in line.cells}
        notes = [note for sign, note in SIGNS.items() if any(re.search(sign, text) for text in texts)]
        return cls(name, title, " ".join([caption.strip(), *notes]), columns, lines)

    def is_best(self, column: int, cell: Cell) -> bool:
        """True if a cell of that column is bold: all cells that tie for the best value."""
        best = self.columns[column].best
        ranks = [line.cells[column].rank for line in self.lines]
        known = [rank for rank in ranks if rank is not None]
        return bool(best) and cell.rank is not None and cell.rank == (max if best == "high" else min)(known)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The headings, and how many columns each spans."""
        return [
            (heading, len(list(columns))) for heading, columns in groupby(self.columns, lambda c: c.heading)
        ]
