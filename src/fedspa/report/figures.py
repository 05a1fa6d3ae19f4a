"""A study's figures. Each panel is headed by the kind of model that it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedspa.core import names
from fedspa.report import masks, numbers
from fedspa.report.cells import CURVES, listed, named, traffic_unit
from fedspa.report.study import Row, Setting, Study
from fedspa.tracking.drawing import (
    BLUE,
    FAINT,
    INK,
    OCHRE,
    SERIES,
    new_figure,
    row_ticks,
    set_title,
    shades,
    spread_out,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS_A_LINE = 2
"""Beside the main table a wider figure would be too small to read."""
LINES, MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D")
"""For more rows than there are colours: each begins the colours anew."""
FEW_SEEDS = 5
"""Fewer seeds than these are drawn one by one: a band over them would claim too much."""


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
    numbered = all(len(row.varied) == 1 and row.varied[0][1].replace(".", "", 1).isdigit() for row in rows)
    ordered = len(rows) > 1 and len({(row.method, row.mask) for row in rows}) == 1 and numbered
    if ordered:
        return {row: Look(color, "-", "o") for row, color in zip(rows, shades(len(rows)), strict=True)}
    several = [
        Look(color, line, marker) for line, marker in zip(LINES, MARKERS, strict=True) for color in SERIES
    ]
    return dict(zip(rows, cycle(several), strict=False))


def accuracy_by_round(study: Study, setting: Setting) -> Picture | None:
    """Curves of every kind of model; None where no run has one."""
    kinds, metric = [kind for kind in study.kinds_of(setting) if kind in CURVES], study.main_metric(setting)
    if not kinds:
        return None
    figure, colors = _panels(len(kinds), 3.7, 3.0, share_y=True), looks(study)
    few = len(study.seeds) < FEW_SEEDS
    for axes, kind in zip(figure.axes, kinds, strict=True):
        for row in study.rows_of(setting):
            if kind not in study.kinds_in(row, setting):
                continue
            curves = numbers.curves([run for run in study.runs(row, setting) if kind in run.kinds], kind)
            mean, std = curves.mean(axis=1), curves.std(axis=1, ddof=0)
            if few and len(curves.columns) > 1:
                axes.plot(curves.index, curves, ".", color=colors[row].color, alpha=0.45, markersize=3)
            elif len(curves.columns) > 1:
                axes.fill_between(
                    curves.index, mean - std, mean + std, color=colors[row].color, alpha=0.13, linewidth=0
                )
            axes.plot(curves.index, mean, colors[row].line, color=colors[row].color, linewidth=1.5)
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.set_xlabel("round")
        axes.locator_params(axis="x", integer=True)
        set_title(
            axes,
            f"{kind} models",
            f"{setting.label}: {named(study, setting)}" if axes is figure.axes[0] else "",
        )
    if study.runs_of(setting)[0].in_percent:
        figure.axes[0].set_ylim(top=min(101, figure.axes[0].get_ylim()[1]))
    _legend(figure, study.rows_of(setting), colors)
    drawn = "" if len(study.seeds) == 1 else (
        f"; a point is one of the seeds {listed(study.seeds)}" if few
        else f"; band: one standard deviation over the seeds {listed(study.seeds)}"
    )  # fmt: skip
    caption = (
        f"Mean {metric} over {study.mean_over} of the {listed(kinds)} models, a panel a kind: compare within a "
        f"panel{drawn}."
    )
    return Picture(f"accuracy-{_slug(setting)}", f"{setting.label}: {metric} by round", caption, figure)


def accuracy_by_traffic(study: Study, setting: Setting) -> Picture | None:
    """The paper's Figure 1 for every kind of model; None where nothing is sent."""
    rows, kinds, metric = study.rows_of(setting), study.kinds_of(setting), study.main_metric(setting)
    sent = {row: numbers.of_summary(study.runs(row, setting), names.TRAFFIC) for row in rows}
    largest = max((seeds.mean for seeds in sent.values() if seeds), default=0)
    if not kinds or not largest:
        return None
    byte, unit = traffic_unit(largest)
    figure, colors = _panels(len(kinds), 3.7, 3.0, share_y=True), looks(study)
    for axes, kind in zip(figure.axes, kinds, strict=True):
        paths: dict[tuple[str, str], list[tuple[float, float]]] = {}
        labels: list[tuple[float, float, str, str]] = []
        for row in rows:
            accuracy, traffic = numbers.final_score(study.runs(row, setting), kind, metric), sent[row]
            if accuracy is None or traffic is None:
                continue
            x = traffic.mean / byte
            paths.setdefault((row.method, row.mask), []).append((x, accuracy.mean))
            axes.plot(
                [v / byte for v in traffic.values], accuracy.values, ".", color=colors[row].color, alpha=0.45
            )
            axes.plot(x, accuracy.mean, colors[row].marker, color=colors[row].color, markersize=5)
            if sparsity := float(study.runs(row, setting)[0].summary["sparsity"]):
                labels.append((accuracy.mean, x, f"{sparsity:g}", colors[row].color))
        for path in paths.values():
            axes.plot(*zip(*sorted(path), strict=True), color=FAINT, linewidth=1, zorder=0)
        if labels:
            low, high = axes.get_ylim()
            heights = spread_out([label[0] for label in sorted(labels)], (high - low) / 18)
            for height, (_, x, text, color) in zip(heights, sorted(labels), strict=True):
                offset: dict[str, Any] = {"xytext": (6, -3), "textcoords": "offset points"}
                axes.annotate(text, (x, height), color=color, fontsize=8, **offset)
        axes.grid(color=FAINT, linewidth=0.6)
        axes.set_xlim(-0.04 * largest / byte, 1.15 * largest / byte)
        axes.set_xlabel(f"traffic of the run, {unit}")
        subtitle = f"{setting.label}: {named(study, setting)} at the end"
        set_title(axes, f"{kind} models", subtitle if axes is figure.axes[0] else "")
    _legend(figure, rows, colors)
    caption = (
        f"Final mean {metric} over {study.mean_over} of the {listed(kinds)} models, a panel a kind, against all bytes "
        "that the run sent, masks included. Numbers are sparsities; a small point is one seed."
    )
    return Picture(f"traffic-{_slug(setting)}", f"{setting.label}: {metric} against traffic", caption, figure)


def client_accuracies(study: Study, setting: Setting) -> Picture | None:
    """The spread of the clients' accuracies at the end; None where no run kept its clients."""
    kinds, rows = study.kinds_of(setting), study.rows_of(setting)
    rows = [row for row in rows if any(len(run.clients) for run in study.runs(row, setting))]
    if not kinds or not rows:
        return None
    figure, colors = (
        _panels(len(kinds), 2.7, 0.9 + 0.42 * len(rows), share_y=True, a_line=len(kinds)),
        looks(study),
    )
    jitter = np.random.default_rng(0)
    for axes, kind in zip(figure.axes, kinds, strict=True):
        for height, row in enumerate(rows):
            known = numbers.client_scores(study.runs(row, setting), kind)
            if not len(known):
                continue
            p10, low, middle, high, p90 = np.percentile(known, [10, 25, 50, 75, 90])
            spread = height + jitter.uniform(-0.28, 0.28, len(known))
            dots: dict[str, Any] = {"markersize": 4, "alpha": 0.4, "markeredgewidth": 0, "rasterized": True}
            axes.plot(known, spread, ".", color=colors[row].color, **dots)
            axes.plot([p10, p90], [height, height], color=colors[row].color, linewidth=1)
            axes.plot(
                [low, high], [height, height], color=colors[row].color, linewidth=4, solid_capstyle="butt"
            )
            axes.plot(middle, height, "o", color="white", markersize=5.5, markeredgecolor=colors[row].color)
        axes.grid(axis="x", color=FAINT, linewidth=0.6)
        axes.set_xlabel(named(study, setting))
        set_title(axes, f"{kind} models", f"{setting.label}: the clients" if axes is figure.axes[0] else "")
    row_ticks(figure.axes[0], [row.label for row in rows])
    caption = (
        f"Each dot is one client in one seed at the end of the run, on its own test set, a panel for each of the "
        f"{listed(kinds)} models. Ring: median; thick line: middle half; thin line: 10th to 90th percentile."
    )
    return Picture(
        f"clients-{_slug(setting)}",
        f"{setting.label}: {study.main_metric(setting)} of the clients",
        caption,
        figure,
    )


def mask_overlap(study: Study, setting: Setting) -> Picture | None:
    """Overlap of masks against overlap of labels, over pairs of clients; None where no run kept masks."""
    found: list[tuple[Row, list[masks.Overlap]]] = []
    for row in study.rows_of(setting):
        computed = (masks.overlap(run) for run in study.runs(row, setting) if run.has_masks)
        if known := [overlap for overlap in computed if overlap]:
            found.append((row, known))
    if not found:
        return None
    figure = _panels(len(found), 2.9, 3.2, share_y=True)
    verdicts = []
    for axes, (row, overlaps) in zip(figure.axes, found, strict=False):
        first = overlaps[0]
        alpha = float(np.clip(100 / len(first.mask_overlap), 0.08, 0.6))
        dots: dict[str, Any] = {"markersize": 5, "alpha": alpha, "markeredgewidth": 0, "rasterized": True}
        axes.plot(first.label_similarity, first.mask_overlap, ".", color=BLUE, **dots)
        axes.axhline(first.by_chance, color=OCHRE, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            "two random masks", (1, first.by_chance), xytext=(0, 4), textcoords="offset points",
            xycoords=("axes fraction", "data"), color=OCHRE, fontsize=8, ha="right",
        )  # fmt: skip
        axes.grid(color=FAINT, linewidth=0.6)
        set_title(axes, row.label, _correlations(overlaps))
        verdicts.append(f"{row.label}: {_correlations(overlaps)}")
    figure.axes[0].set_ylabel("mask overlap")
    figure.supxlabel(f"label similarity of two clients ({setting.label})", color=INK, fontsize=9)
    caption = (
        "Each dot is a pair of clients in the first seed: the share of their label distributions that both have, "
        "against the share of the weights that either mask keeps that both keep, over the tensors that are sparse. "
        "r is Pearson\u2019s, a value a seed; p is the largest of any seed in Mantel\u2019s test with "
        f"{masks.PERMUTATIONS} permutations of the clients. Masks also drift apart with every search, so clients that "
        f"were trained more often are less alike. {'; '.join(verdicts)}."
    )
    title = f"{setting.label}: do alike clients find alike masks?"
    return Picture(f"masks-{_slug(setting)}", title, caption, figure)


def layer_densities(study: Study, setting: Setting) -> Picture | None:
    """The density of each layer under the masks; None where no run kept masks."""
    shares: dict[Row, dict[str, np.ndarray]] = {}
    for row in study.rows_of(setting):
        if runs := [run for run in study.runs(row, setting) if run.has_masks]:
            shares[row] = masks.layer_densities(runs)
    if not shares:
        return None
    layers = list(dict.fromkeys(layer for found in shares.values() for layer in found))
    figure = _panels(1, 6.2, 0.9 + 0.28 * len(layers))
    axes, colors = figure.axes[0], looks(study)
    for place, (row, found) in enumerate(shares.items()):
        shift = 0.5 * (place + 0.5) / len(shares) - 0.25
        for layer, densities in found.items():
            height = layers.index(layer) + shift
            axes.plot(
                np.percentile(densities, [10, 90]),
                [height] * 2,
                color=colors[row].color,
                linewidth=1.2,
                alpha=0.6,
            )
            axes.plot(densities.mean(), height, colors[row].marker, color=colors[row].color, markersize=4.5)
    axes.set_xlim(0, 1.02)
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    row_ticks(axes, layers)
    subtitle = f"{setting.label}: share of active weights by layer, mean over clients"
    set_title(axes, "Density of the masks", subtitle)
    _legend(figure, list(shares), colors)
    caption = (
        "Share of each layer\u2019s weights, biases and norms left out, that the clients\u2019 last masks keep (those "
        "of their personal models): mean over clients and seeds; line: 10th to 90th percentile."
    )
    return Picture(f"density-{_slug(setting)}", f"{setting.label}: density by layer", caption, figure)


DRAWN = (accuracy_by_round, accuracy_by_traffic, client_accuracies, mask_overlap, layer_densities)
"""Every figure of a data setting, in a report's order."""


def _panels(
    count: int, width: float, height: float, share_y: bool = False, a_line: int = PANELS_A_LINE
) -> Figure:
    """A figure of so many panels, each so large in inches, at most `a_line` side by side."""
    columns = min(count, a_line)
    lines = -(-count // columns)
    size = (width * columns + 0.5, height * lines)
    figure, _ = new_figure(*size, heights=[1] * lines, columns=columns, share_y=share_y)
    for spare in figure.axes[count:]:
        spare.remove()
    return figure


def _legend(figure: Figure, rows: Sequence[Row], every: dict[Row, Look]) -> None:
    from matplotlib.lines import Line2D

    handles: list[Any] = [
        Line2D(
            [], [], color=look.color, linestyle=look.line, marker=look.marker, markersize=4, label=row.label
        )
        for row in rows
        for look in [every[row]]
    ]
    look: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "labelcolor": INK, "handlelength": 3}
    figure.legend(handles=handles, loc="outside lower left", ncols=PANELS_A_LINE, **look)


def _correlations(overlaps: list[masks.Overlap]) -> str:
    """`r = 0.22, 0.18, 0.41 (p = 0.034)`, the largest p of any seed."""
    if any(overlap.correlation is None for overlap in overlaps):
        equal = all(np.ptp(overlap.mask_overlap) < 1e-12 for overlap in overlaps)
        return "all masks overlap equally" if equal else "no correlation is defined"
    values = ", ".join(f"{overlap.correlation:.2f}".replace("-", "\u2212") for overlap in overlaps)
    return f"r = {values} (p = {max(overlap.p_value or 0 for overlap in overlaps):.3f})"


def _slug(setting: Setting) -> str:
    text = setting.label.lower()
    return "-".join(part for part in "".join(c if c.isalnum() or c == "." else " " for c in text).split())
