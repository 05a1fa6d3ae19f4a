"""The look of every figure: the palette, bare axes, a title with a line under it, labels that do not collide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT = "#3a3a3a", "#d9d9d9"
BLUE, OCHRE, GREEN, PURPLE = "#4c6a92", "#b5803a", "#5b8a68", "#8b5e83"
RED, GREY, TEAL = "#a8544c", "#8a8a8a", "#5d98a3"
COLORS = {"global": BLUE, "personal": OCHRE, "local": GREEN, "finetuned": PURPLE}
"""By kind of model."""
SERIES = (BLUE, OCHRE, GREEN, RED, PURPLE, GREY, TEAL, "#c7a76c", "#2f4260", "#9bb39f")
"""For anything else that colours distinguish."""
LIGHT_TO_DARK = ("#a9c0dc", "#16263d")
"""The two ends for values that have an order."""


def new_figure(
    width: float, height: float, *, heights: list[int] | None = None, columns: int = 1, share_y: bool = False
) -> tuple[Figure, Any]:
    """A figure (in inches) and its bare axes; it needs no display.

    One axes; or one below the other in the given `heights`, with one x axis; or `columns` side by side, as an
    array.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = {"height_ratios": heights} if heights else {}
    axes = figure.subplots(
        len(heights or [1]),
        columns,
        sharex=bool(heights),
        sharey=share_y,
        squeeze=columns == 1,
        gridspec_kw=grid,
    )
    for one in figure.axes:
        one.spines[["top", "right", "left", "bottom"]].set_visible(False)
        one.tick_params(colors=INK, labelsize=8, length=0)
        one.xaxis.label.set(color=INK, fontsize=9)
        one.yaxis.label.set(color=INK, fontsize=9)
    return figure, axes if columns == 1 else axes.ravel()


def set_title(axes: Axes, title: str, subtitle: str) -> None:
    """A bold title above the axes, and a line under it that says what is shown."""
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold", pad=20)
    axes.annotate(
        subtitle,
        (0, 1),
        xytext=(0, 7),
        xycoords="axes fraction",
        textcoords="offset points",
        color=INK,
        fontsize=8.5,
    )


def spread_out(heights: list[float], gap: float, top: float) -> list[float]:
    """Ascending label heights pushed apart to at least `gap`, around where they belong, at most `top`."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    shift = sum(p - h for p, h in zip(placed, heights, strict=True)) / len(heights)
    shift = max(shift, placed[-1] - top)
    return [height - shift for height in placed]


def shades(count: int) -> list[str]:
    """So many colours from light to dark, for values that have an order."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    scale = LinearSegmentedColormap.from_list("order", LIGHT_TO_DARK)
    return [to_hex(scale(i / max(count - 1, 1))) for i in range(count)]


def row_ticks(axes: Axes, labels: Sequence[str]) -> None:
    """A label for each row, the first one on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
