"""A table, and how it looks in Markdown, in LaTeX (booktabs) and in HTML."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

MISSING = "missing"
"""The text of a cell that has no finished run."""
NONE = "\u2013"
"""The text of a cell that cannot have a value."""


@dataclass(frozen=True)
class Column:
    """A column under the heading of its group; neighbours of the same group share the heading."""

    group: str
    name: str
    best: Literal["high", "low", ""] = ""
    """Which rank is bold."""


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and what it is ranked by: as rounded as it is shown, so that equal looks are equal."""

    text: str
    rank: float | None = None


@dataclass(frozen=True)
class Table:
    """Rows are (label, cells), a cell for each column."""

    name: str
    """Unique in a report: of letters, digits and dashes."""
    title: str
    caption: str
    """What the table shows, and of which kind of model."""
    columns: list[Column]
    rows: list[tuple[str, list[Cell]]]

    def is_best(self, column: int, cell: Cell) -> bool:
        """Whether a cell of that column is bold: ties all are, and a column with one ranked cell has no best."""
        ranks = [cells[column].rank for _, cells in self.rows]
        known = [rank for rank in ranks if rank is not None]
        if cell.rank is None or len(known) < 2 or not self.columns[column].best:
            return False
        return cell.rank == (max(known) if self.columns[column].best == "high" else min(known))

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The headings, and how many columns each spans."""
        return [
            (group, len(list(columns))) for group, columns in groupby(self.columns, key=lambda c: c.group)
        ]


def markdown(table: Table) -> str:
    """The table alone; a heading of several columns is repeated in each."""
    heads = [": ".join(part for part in (column.group, column.name) if part) for column in table.columns]
    lines = [["", *heads], ["---", *("---:" for _ in heads)]]
    for label, cells in table.rows:
        texts = [_escape_markdown(cell.text) for cell in cells]
        bold = [f"**{text}**" if table.is_best(i, cells[i]) else text for i, text in enumerate(texts)]
        lines.append([_escape_markdown(label), *bold])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def latex(table: Table) -> str:
    """A whole `table` environment; it needs the packages booktabs and, for wide ones, graphicx."""
    count = len(table.columns)
    spans, rules, first = [""], [], 2
    for group, span in table.groups:
        spans.append(f"\\multicolumn{{{span}}}{{c}}{{{_escape_latex(group)}}}")
        rules.append(f"\\cmidrule(lr){{{first}-{first + span - 1}}}")
        first += span
    body = [
        f"\\begin{{tabular}}{{l{'r' * count}}}",
        "\\toprule",
        *([f"{' & '.join(spans)} \\\\", " ".join(rules)] if any(group for group, _ in table.groups) else []),
        f"{' & '.join(['', *(_escape_latex(column.name) for column in table.columns)])} \\\\",
        "\\midrule",
        *(
            f"{' & '.join([_escape_latex(label), *_latex_cells(table, cells)])} \\\\"
            for label, cells in table.rows
        ),
        "\\bottomrule",
        "\\end{tabular}",
    ]
    if count > 6:
        body = ["\\resizebox{\\textwidth}{!}{%", *body[:-1], body[-1] + "}"]
    head = [
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{_escape_latex(f'{table.title}. {table.caption}')}}}",
    ]
    return "\n".join([*head, f"\\label{{tab:{table.name}}}", *body, "\\end{table}"]) + "\n"


def html_table(table: Table) -> str:
    """A `table` element."""
    spans = "".join(f'<th colspan="{span}">{html.escape(group)}</th>' for group, span in table.groups)
    names = "".join(f"<th>{html.escape(column.name)}</th>" for column in table.columns)
    lines = ["<table>", "<thead>"]
    if any(group for group, _ in table.groups):
        lines.append(f'<tr class="groups"><th></th>{spans}</tr>')
    lines += [f"<tr><th></th>{names}</tr>", "</thead>", "<tbody>"]
    for label, cells in table.rows:
        texts = "".join(_html_cell(table, i, cell) for i, cell in enumerate(cells))
        lines.append(f"<tr><th>{html.escape(label)}</th>{texts}</tr>")
    return "\n".join([*lines, "</tbody>", "</table>"])


def _html_cell(table: Table, column: int, cell: Cell) -> str:
    text = html.escape(cell.text)
    if cell.text == MISSING:
        return f'<td class="missing">{text}</td>'
    return f"<td><b>{text}</b></td>" if table.is_best(column, cell) else f"<td>{text}</td>"


def _latex_cells(table: Table, cells: list[Cell]) -> list[str]:
    texts = [_escape_latex(cell.text) for cell in cells]
    return [f"\\textbf{{{text}}}" if table.is_best(i, cells[i]) else text for i, text in enumerate(texts)]


def _escape_markdown(text: str) -> str:
    return re.sub(r"([|*_<>])", r"\\\1", text)


LATEX = {
    "\\": r"\textbackslash{}", "\u00b1": r"$\pm$", "\u2212": "$-$", "\u2013": "--", ">": "$>$", "<": "$<$",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\u2019": "'", "\u00d7": r"$\times$",
    "\u2265": r"$\geq$", **{char: f"\\{char}" for char in "%_&#${}"},
}  # fmt: skip


def _escape_latex(text: str) -> str:
    return "".join(LATEX.get(char, char) for char in text)
