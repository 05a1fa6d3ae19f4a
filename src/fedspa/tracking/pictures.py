"""Pictures of a run: who holds which labels, accuracy by round, the quantities of Theorem 1."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedspa.core import names
from fedspa.core.files import write_whole
from fedspa.core.records import KINDS, RoundRecord, TheoryRow
from fedspa.core.tracker import RunInfo, RunResult
from fedspa.tracking.drawing import COLORS, FAINT, INK, new_figure, row_ticks, set_title, spread_out
from fedspa.tracking.tables import read_table

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(kw_only=True)
class Pictures:
    """Draws partition.png before the first round and accuracy.png at the end, however the run ends.

    With `theory.every` a run that ends well also gets theory.png.
    """

    name: str = "pictures"

    def start(self, info: RunInfo) -> None:
        self._info = info
        if info.label_counts is not None and info.classes and not info.many:
            save(partition_picture(info.label_counts), info.folder / "partition.png")

    def round(self, record: RoundRecord) -> None:
        """Nothing: the picture is drawn from the folder's tables at the end."""

    def finish(self, result: RunResult) -> None:
        self._draw_accuracy(names.final_scores(result.summary)[self._info.metrics[0]].get("finetuned"))
        if result.theory:
            save(theory_picture(result.theory), self._info.folder / "theory.png")

    def abort(self, status: str, reason: str) -> None:
        self._draw_accuracy()

    def _draw_accuracy(self, finetuned: Mapping[str, float] | None = None) -> None:
        rounds = read_table(self._info.folder / "rounds.csv")
        curves: dict[str, list[tuple[int, float, float]]] = {}
        for kind in self._info.kinds:
            columns = (rounds[names.score(self._info.metrics[0], kind, part)] for part in ("mean", "std"))
            points = [point for point in zip(rounds["round"], *columns, strict=True) if point[1] == point[1]]
            curves |= {kind: points} if points else {}
        if finetuned:
            curves["finetuned"] = [(self._info.rounds, finetuned["mean"], finetuned["std"])]
        if curves:
            title = str(self._info.config.get("name", "run"))
            what = "accuracy in %" if self._info.in_percent else self._info.metrics[0]
            save(score_picture(curves, title, what, self._info.mean_over), self._info.folder / "accuracy.png")


def theory_picture(rows: list[TheoryRow]) -> Figure:
    """The quantities of the paper's Theorem 1 over the rounds, side by side."""
    figure, (norm, masks, ratio) = new_figure(10.5, 3.4, columns=3)
    rounds = [row.round for row in rows]
    norm.plot(rounds, [row.gradient_norm_sq for row in rows], color=INK, linewidth=1.8)
    norm.set_yscale("log")
    set_title(norm, "Gradient of the objective", "squared norm at w, under the final masks")
    for name, color in (("mask_step", COLORS["personal"]), ("mask_to_final", COLORS["global"])):
        masks.plot(rounds, [100 * getattr(row, name) for row in rows], color=color, linewidth=1.8)
    set_title(masks, "Distance of masks", "% of coordinates: to the next (ochre), to the final (blue)")
    known = [(row.round, row.p) for row in rows if row.p is not None]
    ratio.plot([round for round, _ in known], [p for _, p in known], color=INK, linewidth=1.8)
    set_title(ratio, "p", "over first and last local points")
    for axes in (norm, masks, ratio):
        axes.set_xlabel("round")
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
    return figure


def score_picture(
    curves: dict[str, list[tuple[int, float, float]]],
    title: str,
    what: str = "accuracy in %",
    mean_over: str = "clients",
) -> Figure:
    """A line a kind of model: mean over clients with a band of one standard deviation, named at its end.

    `mean_over` says what the means are over. `curves[kind]` holds (round, mean, std) of `what`. Percentages are drawn
    from 0 to 100, other numbers from 0 to the largest. A single point is drawn as a dot.
    """
    import numpy as np

    unit = " %" if what.endswith("%") else ""
    drawn = {kind: np.array(curves[kind]).T for kind in KINDS if curves.get(kind)}
    highest = np.concatenate([means + stds for _, means, stds in drawn.values()])
    top = 100.0 if unit else 1.05 * max(highest[np.isfinite(highest)], default=1.0)
    figure, axes = new_figure(7.2, 4.2)
    for kind, (rounds, means, stds) in drawn.items():
        low, high = (means - stds).clip(min=0), (means + stds).clip(max=top)
        axes.fill_between(rounds, low, high, color=COLORS[kind], alpha=0.10, linewidth=0)
        axes.plot(rounds, means, color=COLORS[kind], linewidth=1.8, marker="o" if len(rounds) == 1 else None)
    last = max(rounds[-1] for rounds, *_ in drawn.values())
    axes.set_xlim(min(rounds[0] for rounds, *_ in drawn.values()) - 0.5, last + 0.5)
    axes.set_ylim(0, top)
    ends = sorted((means[-1], kind) for kind, (_, means, _) in drawn.items())
    for height, (mean, kind) in zip(
        spread_out([mean for mean, _ in ends], 0.055 * top, top), ends, strict=True
    ):
        axes.annotate(
            f"{kind} {names.shown(mean, unit, 1)}", (last, height), xytext=(10, 0), textcoords="offset points",
            color=COLORS[kind], va="center", fontsize=9.5, fontweight="bold", annotation_clip=False,
        )  # fmt: skip
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("round")
    set_title(axes, title, f"{what}, mean over {mean_over}; band: one standard deviation between clients")
    return figure


def partition_picture(label_counts: np.ndarray) -> Figure:
    """A heat map of `label_counts` (int64 [clients, classes]), the size of each client above it."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    clients, classes = label_counts.shape
    width, height = min(4.0 + 0.12 * clients, 12.0), min(2.6 + 0.14 * classes, 7.0)
    figure, (sizes, cells) = new_figure(width, height, heights=[1, 4])
    sizes.bar(
        range(clients), label_counts.sum(axis=1), color=COLORS["global"], width=0.8 if clients <= 60 else 1.0
    )
    sizes.tick_params(labelbottom=False, bottom=False)
    sizes.set_ylabel("images")
    sizes.locator_params(axis="y", nbins=3)
    sizes.set_ylim(bottom=0)

    # Counts are skewed, so the square root of a count sets its shade; no image at all stays white.
    shades = LinearSegmentedColormap.from_list("counts", ["#ffffff", "#c3d0e0", COLORS["global"], "#1f2f47"])
    norm = PowerNorm(0.5, vmin=0, vmax=max(1, label_counts.max()))
    image = cells.imshow(label_counts.T, aspect="auto", cmap=shades, norm=norm, interpolation="nearest")
    if classes <= 26:
        cells.set_yticks(range(classes))
    for axis in (cells.xaxis, cells.yaxis):
        if axis is cells.xaxis or classes > 26:
            axis.get_major_locator().set_params(integer=True)
    cells.tick_params(length=0)
    cells.set_xlabel("client")
    cells.set_ylabel("class")
    bar = figure.colorbar(image, ax=[sizes, cells], fraction=0.03, pad=0.02, aspect=30)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, colors=INK, labelsize=8)
    bar.ax.locator_params(nbins=5)
    set_title(sizes, "Who holds which labels", "training images by client and class")
    return figure


def study_picture(runs: pd.DataFrame) -> Figure:
    """The final scores of a study, a line for each label: a point for each run, a dot at their mean.

    `runs`: a row for each run under its label, a column for each kind of model. The metric is the name of its columns.
    """
    places, labels = runs.index.factorize()
    figure, axes = new_figure(8.4, 1.2 + 0.32 * len(labels))
    for number, kind in enumerate(runs):
        # Kinds with equal scores must not cover each other.
        shift = 0.4 * ((number + 0.5) / len(runs.columns) - 0.5)
        axes.plot(runs[kind], places + shift, ".", color=COLORS[kind], alpha=0.45)
        means = runs[kind].groupby(places).mean()
        axes.plot(means, means.index + shift, "o", color=COLORS[kind], markersize=5, label=kind)
    row_ticks(axes, list(labels))
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    set_title(axes, "Scores at the end", f"{runs.columns.name}; small points: single runs; dots: their means")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8.5, labelcolor=INK)
    return figure


def save(figure: Figure, file: Path) -> None:
    """Write a figure as PNG."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    write_whole(file, drawn.getvalue())
