"""The form of a study's figures: panels side by side, a look for each row of the study, and a legend below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from fedspa.report.study import Row, Study
from fedspa.tracking.drawing import INK, SERIES, new_figure, shades

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS_A_LINE = 2
"""Beside the main table a wider figure would be too small to read."""
LINES, MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D")
"""For more rows than there are colours: each begins the colours anew."""


@dataclass(frozen=True)
class Picture:
    """A figure with its caption. `name` is unique in a report, and the files' name."""

    name: str
    title: str
    caption: str
    figure: Figure


class Look(NamedTuple):
    """The look of a row's lines and points."""

    color: str
    line: Any
    marker: str


def looks(study: Study) -> dict[Row, Look]:
    """The look of each row: from light to dark where the rows are one method at several numbers."""
    rows = study.rows
    numbered = all(len(row.varied) == 1 and isinstance(row.varied[0][1], int | float) for row in rows)
    if len(rows) > 1 and len({(row.method, row.mask) for row in rows}) == 1 and numbered:
        return {row: Look(color, "-", "o") for row, color in zip(rows, shades(len(rows)), strict=True)}
    several = [Look(color, *kind) for kind in zip(LINES, MARKERS, strict=True) for color in SERIES]
    return dict(zip(rows, cycle(several), strict=False))


def panels(count: int, size: tuple[float, float], a_line: int = PANELS_A_LINE) -> Figure:
    """A figure of so many panels, each so large in inches, at most `a_line` side by side."""
    columns = min(count, a_line)
    lines = -(-count // columns)
    width, height = size
    figure, _ = new_figure(
        width * columns + 0.5, height * lines, heights=[1] * lines, columns=columns, share_y=True
    )
    for spare in figure.axes[count:]:
        spare.remove()
    for axes in figure.axes:  # also of the last one above a removed one
        axes.tick_params(labelbottom=True)
    return figure


def legend(figure: Figure, study: Study, rows: Sequence[Row]) -> None:
    from matplotlib.lines import Line2D

    handles: list[Any] = []
    for row, (color, line, marker) in looks(study).items():
        if row in rows:
            style: dict[str, Any] = {"color": color, "linestyle": line, "marker": marker, "markersize": 4}
            handles.append(Line2D([], [], **style, label=row.label))
    look: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "labelcolor": INK, "handlelength": 3}
    figure.legend(handles=handles, loc="outside lower left", ncols=PANELS_A_LINE, **look)
