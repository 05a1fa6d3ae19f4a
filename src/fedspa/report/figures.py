"""A study's figures. Each panel is headed by the kind of model that it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedspa.core import names
from fedspa.core.errors import listed
from fedspa.report import masks
from fedspa.report.labels import slug
from fedspa.report.panels import PANELS_A_LINE, Look, Picture, legend, looks, panels
from fedspa.report.study import Row, Setting, Study
from fedspa.report.tables import CURVES, metric_text, traffic_unit
from fedspa.tracking.drawing import BLUE, FAINT, INK, OCHRE, row_ticks, set_title, spread_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW_SEEDS = 5
"""Fewer seeds than these are drawn one by one: a band over them would claim too much."""
DOT: dict[str, Any] = {"alpha": 0.4, "markeredgewidth": 0, "rasterized": True}
"""The look of a point that is one of very many."""


def accuracy_by_round(study: Study, setting: Setting) -> Picture | None:
    """Curves of every kind of model; None where no run has one."""
    few, several = len(study.seeds) < FEW_SEEDS, len(study.seeds) > 1
    kinds, rows = [kind for kind in setting.kinds if kind in CURVES], setting.rows
    if not kinds:
        return None

    def draw(axes: Axes, kind: str, row: Row, look: Look) -> None:
        curves = pd.DataFrame({run.seed: run.curve(kind) for run in setting.runs_of(row)}).dropna()
        mean, std = curves.mean(axis=1), curves.std(axis=1, ddof=0)
        if several and few:
            axes.plot(curves, ".", color=look.color, alpha=0.45, markersize=3)
        elif several:
            axes.fill_between(curves.index, mean - std, mean + std, color=look.color, alpha=0.13, linewidth=0)
        axes.plot(mean, look.line, color=look.color, linewidth=1.5)

    figure = _by_kind(study, setting, kinds, rows, draw, xlabel="round")
    for axes in figure.axes:
        axes.locator_params(axis="x", integer=True)
    legend(figure, study, rows)
    drawn = "a point is one of" if few else "band: one standard deviation over"
    seeds = f"; {drawn} the seeds {listed(study.seeds)}" if several else ""
    metric = setting.metric
    caption = (
        f"Mean {metric} over {study.mean_over} of the {listed(kinds)} models, a panel for each: compare within a "
        f"panel{seeds}."
    )
    return Picture(f"accuracy-{slug(setting.label)}", f"{setting.label}: {metric} by round", caption, figure)


def accuracy_by_traffic(study: Study, setting: Setting) -> Picture | None:
    """The paper's Figure 1 for every kind of model; None where nothing is sent."""
    rows, kinds, metric = setting.rows, setting.kinds, setting.metric
    largest = max(run.summary[names.TRAFFIC] for run in setting.runs)
    if not kinds or not largest:
        return None
    byte, unit = traffic_unit(largest)
    ends: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    tags: dict[str, list[tuple[float, float, str, str]]] = {}

    def draw(axes: Axes, kind: str, row: Row, look: Look) -> None:
        runs = setting.runs_of(row)
        points = [(run.summary[names.TRAFFIC] / byte, run.scores(metric)[kind]["mean"]) for run in runs]
        x, y = np.mean(points, axis=0)
        axes.plot(*zip(*points, strict=True), ".", color=look.color, alpha=0.45)
        axes.plot(x, y, look.marker, color=look.color, markersize=5)
        ends.setdefault((kind, row.method, row.mask), []).append((x, y))
        sparsity = runs[0].summary["sparsity"]
        if row.varied and sparsity:  # of a method alone the legend says enough
            tags.setdefault(kind, []).append((y, x, f"{sparsity:g}", look.color))

    figure = _by_kind(study, setting, kinds, rows, draw, xlabel=f"traffic of the run, {unit}")
    legend(figure, study, rows)
    figure.axes[0].set_xlim(-0.04 * largest / byte, 1.15 * largest / byte)
    low, high = figure.axes[0].get_ylim()
    for axes, kind in zip(figure.axes, kinds, strict=True):
        for (of, *_), path in ends.items():
            if of == kind:
                axes.plot(*zip(*sorted(path), strict=True), color=FAINT, linewidth=1, zorder=0)
        labels = sorted(tags.get(kind, []))
        heights = spread_out([y for y, *_ in labels], (high - low) / 18, high) if labels else []
        for height, (_, x, text, color) in zip(heights, labels, strict=True):
            axes.annotate(
                text, (x, height), xytext=(6, -3), textcoords="offset points", color=color, fontsize=8
            )
    caption = (
        f"Final mean {metric} over {study.mean_over} of the {listed(kinds)} models, a panel for each, against all "
        "bytes that the run sent, masks included."
        + " Numbers are sparsities." * bool(tags)
        + " A small point is one seed." * (len(study.seeds) > 1)
    )
    title = f"{setting.label}: {metric} against traffic"
    return Picture(f"traffic-{slug(setting.label)}", title, caption, figure)


def client_accuracies(study: Study, setting: Setting) -> Picture | None:
    """The spread of the clients' accuracies at the end; None where no run kept its clients."""
    kinds, metric = setting.kinds, setting.metric
    rows = [row for row in setting.rows if any(len(run.clients) for run in setting.runs_of(row))]
    if not kinds or not rows:
        return None
    jitter = np.random.default_rng(0)

    def draw(axes: Axes, kind: str, row: Row, look: Look) -> None:
        column, height = names.score(metric, kind), rows.index(row)
        known = [run.clients[column].dropna() for run in setting.runs_of(row) if column in run.clients]
        if not (scores := np.concatenate(known or [[]])).size:
            return
        p10, low, middle, high, p90 = np.percentile(scores, [10, 25, 50, 75, 90])
        axes.plot(
            scores, height + jitter.uniform(-0.28, 0.28, len(scores)), ".", color=look.color, ms=4, **DOT
        )
        axes.plot([p10, p90], [height, height], color=look.color, linewidth=1)
        axes.plot([low, high], [height, height], color=look.color, linewidth=4, solid_capstyle="butt")
        axes.plot(middle, height, "o", color="white", markersize=5.5, markeredgecolor=look.color)

    size, xlabel = (2.7, 0.9 + 0.42 * len(rows)), metric_text(setting)
    figure = _by_kind(study, setting, kinds, rows, draw, xlabel=xlabel, size=size, a_line=len(kinds))
    row_ticks(figure.axes[0], [row.label for row in rows])
    caption = (
        f"Each dot is one client in one seed at the end of the run, on its own test set, a panel for each of the "
        f"{listed(kinds)} models. Ring: median; thick line: middle half; thin line: 10th to 90th percentile."
    )
    title = f"{setting.label}: {metric} of the clients"
    return Picture(f"clients-{slug(setting.label)}", title, caption, figure)


def mask_overlap(study: Study, setting: Setting) -> Picture | None:
    """Overlap of masks against overlap of labels, over pairs of clients; None where no run kept masks."""
    found: dict[Row, list[masks.Overlap]] = {}
    for row in setting.rows:
        computed = [masks.overlap(run) for run in setting.runs_of(row) if run.has_masks]
        if known := [overlap for overlap in computed if overlap]:
            found[row] = known
    if not found:
        return None
    figure = panels(len(found), (2.9, 3.2))
    verdicts = {row.label: _correlations(overlaps) for row, overlaps in found.items()}
    for axes, (label, verdict), (first, *_) in zip(
        figure.axes, verdicts.items(), found.values(), strict=True
    ):
        alpha = float(np.clip(100 / len(first.mask_overlap), 0.08, 0.6))
        axes.plot(
            first.label_similarity, first.mask_overlap, ".", color=BLUE, ms=5, **{**DOT, "alpha": alpha}
        )
        axes.axhline(first.by_chance, color=OCHRE, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            "two random masks", (1, first.by_chance), xytext=(0, 4), textcoords="offset points",
            xycoords=("axes fraction", "data"), color=OCHRE, fontsize=8, ha="right",
        )  # fmt: skip
        axes.grid(color=FAINT, linewidth=0.6)
        set_title(axes, label, verdict)
    figure.axes[0].set_ylabel("mask overlap")
    figure.supxlabel(f"label similarity of two clients ({setting.label})", color=INK, fontsize=9)
    caption = (
        "Each dot is a pair of clients in the first seed. Across: how alike their labels are (1: the same share of "
        "each class; 0: no class in common). Up: how alike their masks are (1: the same weights; 0: no weight in "
        "common), in sparse tensors. r is Pearson\u2019s, one value for each seed; p is the largest of any seed in "
        "Mantel\u2019s test with "
        f"{masks.PERMUTATIONS} permutations of the clients. Masks also drift apart with every search, so clients that "
        f"were trained more often are less alike. {'; '.join(map(': '.join, verdicts.items()))}."
    )
    title = f"{setting.label}: do alike clients find alike masks?"
    return Picture(f"masks-{slug(setting.label)}", title, caption, figure)


def layer_densities(study: Study, setting: Setting) -> Picture | None:
    """The density of each layer under the masks; None where no run kept masks."""
    kept = {row: [run for run in setting.runs_of(row) if run.has_masks] for row in study.rows}
    shares = {row: masks.layer_densities(runs) for row, runs in kept.items() if runs}
    if not shares:
        return None
    layers = list(dict.fromkeys(layer for found in shares.values() for layer in found))
    figure, every = panels(1, (6.2, 0.9 + 0.28 * len(layers))), looks(study)
    [axes] = figure.axes
    for place, (row, found) in enumerate(shares.items()):
        color, _, marker = every[row]
        for layer, densities in found.items():
            height = layers.index(layer) + 0.5 * (place + 0.5) / len(shares) - 0.25
            axes.plot(np.percentile(densities, [10, 90]), [height] * 2, color=color, linewidth=1.2, alpha=0.6)
            axes.plot(densities.mean(), height, marker, color=color, markersize=4.5)
    axes.set_xlim(0, 1.02)
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    row_ticks(axes, layers)
    subtitle = f"{setting.label}: share of active weights by layer, mean over clients"
    set_title(axes, "Density of the masks", subtitle)
    legend(figure, study, list(shares))
    caption = (
        "Share of each layer\u2019s weights, biases and norms left out, that the clients\u2019 last masks keep (those "
        "of their personal models): mean over clients and seeds; line: 10th to 90th percentile."
    )
    return Picture(f"density-{slug(setting.label)}", f"{setting.label}: density by layer", caption, figure)


DRAWN = (accuracy_by_round, accuracy_by_traffic, client_accuracies, mask_overlap, layer_densities)
"""Every figure of a data setting, in a report's order."""


def _by_kind(
    study: Study, setting: Setting, kinds: Sequence[str], rows: Sequence[Row],
    draw: Callable[[Axes, str, Row, Look], None], *,
    xlabel: str, size: tuple[float, float] = (3.7, 3.0), a_line: int = PANELS_A_LINE,
) -> Figure:  # fmt: skip
    """A panel for each kind of model, in which `draw` draws each row that has such models."""
    figure, every = panels(len(kinds), size, a_line), looks(study)
    for axes, kind in zip(figure.axes, kinds, strict=True):
        for row in rows:
            if all(kind in run.kinds for run in setting.runs_of(row)):
                draw(axes, kind, row, every[row])
        axes.grid(color=FAINT, linewidth=0.6)
        axes.set_xlabel(xlabel)
        subtitle = f"{setting.label}: {metric_text(setting)}"
        set_title(axes, f"{kind} models", subtitle if axes is figure.axes[0] else "")
    if setting.unit:
        figure.axes[0].set_ylim(top=min(101, figure.axes[0].get_ylim()[1]))
    return figure


def _correlations(overlaps: list[masks.Overlap]) -> str:
    """`r = 0.22, 0.18, 0.41 (p = 0.034)`, the largest p of any seed."""
    if any(overlap.correlation is None for overlap in overlaps):
        equal = all(np.ptp(overlap.mask_overlap) < 1e-12 for overlap in overlaps)
        return "all masks overlap equally" if equal else "no correlation is defined"
    values = ", ".join(f"{overlap.correlation:.2f}".replace("-", "\u2212") for overlap in overlaps)
    return f"r = {values} (p = {max(overlap.p_value or 0 for overlap in overlaps):.3f})"
