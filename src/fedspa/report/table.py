"""A table of a report: its columns take one number from each run, its cells show the numbers of all seeds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

import numpy as np

from fedspa.core.errors import listed
from fedspa.costs.units import show_count
from fedspa.report.runs import Run
from fedspa.report.study import Row, Setting, Study

NO_RUN = "missing"
"""The text of a cell that has no finished run."""
NO_VALUE = "\u2013"
"""The text of a cell whose runs have no such number."""
SIGNS = {
    f"^{NO_VALUE}$": f"\u201c{NO_VALUE}\u201d: there is no such model, or no count.",
    f"^{NO_RUN}$": f"\u201c{NO_RUN}\u201d: there is no finished run.",
    "^>": "> and a number of rounds: not every seed got there within these rounds; (1/3): 1 of 3 seeds did.",
    r"^[^>].*\(\d+/\d+\)": "(n/m): n of m clients have such a model; a local one needs a client update.",
    r"\[": "[2 seeds]: fewer seeds than the study has.",
}
"""The meaning of signs in cells, by an expression that finds the sign."""


class Cell(NamedTuple):
    """The text of a cell, and the numbers behind it."""

    text: str
    values: tuple[float, ...] = ()
    """One number of each seed, with all digits; infinity if a seed never reached the goal."""

    @property
    def mean(self) -> float | None:
        """The mean; None without a number, or if a seed never reached the goal."""
        return float(np.mean(self.values)) if self.values and math.inf not in self.values else None

    @property
    def std(self) -> float | None:
        """The standard deviation of the population, as in the paper."""
        return float(np.std(self.values)) if self.mean is not None else None


@dataclass(frozen=True)
class Column:
    """A column of a table, and its place in results.csv."""

    setting: Setting
    group: str
    """The heading that neighbours share."""
    name: str
    value: Callable[[Run], float | None]
    """The number of a run; None if it has none, infinity if it never reached the goal."""
    digits: int = 1
    scale: float = 1.0
    """The unit in which cells show numbers."""
    best: Literal["high", "low", "cost", ""] = ""
    """The number that is bold; a cost of nothing is no candidate."""
    note: Callable[[Sequence[Run], float], str] = lambda runs, mean: ""
    """The end of a cell's text, from its runs and their mean."""
    text: Callable[[Sequence[Run]], str] | None = None
    """The text of a cell whose runs have no number."""
    quantity: str = ""
    """The name in results.csv; "" for a column that is not there."""
    unit: str = ""
    kind: str = ""
    target: str = ""

    def cell(self, runs: Sequence[Run], seeds: int) -> Cell:
        """The cell of a row's runs in a study with so many seeds."""
        if not runs:
            return Cell(NO_RUN)
        if self.text:
            return Cell(self.text(runs))
        values = tuple(float(value) for run in runs if (value := self.value(run)) is not None)
        if not values:
            return Cell(NO_VALUE)
        cell = Cell("", values)
        if cell.mean is None:
            reached = sum(map(math.isfinite, values))
            text = f">{max(run.limit for run in runs)}" + f" ({reached}/{len(values)})" * bool(reached)
        else:
            text = f"{cell.mean / self.scale:.{self.digits}f}" if cell.mean or self.best != "cost" else "0"
            if len(set(values)) > 1:
                text += f" \u00b1 {np.std(values) / self.scale:.{self.digits}f}"
            text += self.note(runs, cell.mean)
        fewer = f" [{show_count(len(values), 'seed')}]" if len(values) < seeds else ""
        return Cell(text + fewer, values)

    def shown(self, cell: Cell) -> float | None:
        """The number as the cell shows it, so that cells that look equal are equally good."""
        mean = cell.mean
        if mean is None or not self.best or (not mean and self.best == "cost"):
            return None
        return round(mean / self.scale, self.digits)


@dataclass(frozen=True)
class Table:
    """A table. `name` is unique in a report: letters, digits, points and dashes."""

    name: str
    title: str
    caption: str
    columns: list[Column]
    lines: dict[Row, list[Cell]]
    """The cells of each row, one a column."""

    @classmethod
    def make(
        cls,
        study: Study,
        name: str,
        title: str,
        caption: str,
        columns: list[Column],
        rows: Sequence[Row] = (),
    ) -> Table:
        """Compute the cells, and explain the signs in them. `rows`: all of the study unless given."""
        lines = {
            row: [column.cell(column.setting.runs_of(row), len(study.seeds)) for column in columns]
            for row in rows or study.rows
        }
        texts = [cell.text for cells in lines.values() for cell in cells]
        notes = [note for sign, note in SIGNS.items() if any(re.search(sign, text) for text in texts)]
        return cls(name, title, " ".join([caption.strip(), *notes]), columns, lines)

    def is_best(self, column: int, cell: Cell) -> bool:
        """True if a cell of that column is bold; ties all are."""
        of = self.columns[column]
        shown = [of.shown(cells[column]) for cells in self.lines.values()]
        known = [number for number in shown if number is not None]
        return bool(known) and of.shown(cell) == (max if of.best == "high" else min)(known)

    @property
    def groups(self) -> list[tuple[str, int, int]]:
        """The headings, and the first and the last column below each, from 2: the rows' labels are column 1."""
        spans = [
            (head, [place for place, _ in columns])
            for head, columns in groupby(enumerate(self.columns, 2), lambda column: column[1].group)
        ]
        return [(head, places[0], places[-1]) for head, places in spans]


def seeds_text(study: Study) -> str:
    """The seeds, and how a cell comes from them, in words."""
    if len(study.seeds) == 1:
        return f"one seed, {study.seeds[0]}"
    return f"mean \u00b1 standard deviation (ddof = 0) over the seeds {listed(study.seeds)}"
