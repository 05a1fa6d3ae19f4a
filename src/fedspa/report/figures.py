"""A study's figures. Each panel is headed by the kind of model that it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedspa.report import masks, measures
from fedspa.report.study import Row, Setting, Study
from fedspa.report.tables import traffic_unit
from fedspa.tracking.drawing import BLUE, FAINT, INK, OCHRE, SERIES, new_figure, set_title, shades

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS_A_LINE = 4


@dataclass(frozen=True)
class Picture:
    """A figure with what is to be said of it."""

    name: str
    """Unique in a report; the files' name."""
    title: str
    caption: str
    """What it shows, and of which kind of model."""
    figure: Figure


def row_colors(study: Study) -> dict[Row, str]:
    """A colour a row: from light to dark where the rows are one method at several numbers."""
    rows = study.rows
    ordered = len(rows) > 1 and len({(row.method, row.mask) for row in rows}) == 1 and _one_number(rows)
    colors = shades(len(rows)) if ordered else [SERIES[i % len(SERIES)] for i in range(len(rows))]
    return dict(zip(rows, colors, strict=True))


def accuracy_by_round(study: Study, setting: Setting) -> Picture | None:
    """Curves of every kind of model; None where no run has one."""
    kinds = [kind for kind in study.kinds_of(setting) if kind != "finetuned"]
    if not kinds:
        return None
    figure = _panels(len(kinds), 3.1, 3.2, share_y=True)
    colors = row_colors(study)
    for axes, kind in zip(figure.axes, kinds, strict=True):
        for row in study.rows_of(setting):
            runs = [run for run in study.runs(row, setting) if kind in run.kinds]
            if not runs:
                continue
            rounds, mean, std = measures.curve_over_seeds(runs, kind)
            if len(runs) > 1:
                axes.fill_between(rounds, mean - std, mean + std, color=colors[row], alpha=0.13, linewidth=0)
            axes.plot(rounds, mean, color=colors[row], linewidth=1.5)
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.set_xlabel("round")
        axes.locator_params(axis="x", integer=True)
        set_title(axes, f"{kind} models", f"{setting.label}: accuracy in %" if axes is figure.axes[0] else "")
    figure.axes[0].set_ylim(top=min(101, figure.axes[0].get_ylim()[1]))
    _legend(figure, study.rows_of(setting), colors)
    band = (
        f"; band: one standard deviation over the seeds {_list(study.seeds)}" if len(study.seeds) > 1 else ""
    )
    return Picture(
        f"accuracy-{_slug(setting)}",
        f"{setting.label}: accuracy by round",
        f"Mean accuracy over {study.mean_over} of the {_list(kinds)} models, a panel a kind: compare within a "
        f"panel{band}.",
        figure,
    )


def accuracy_by_traffic(study: Study, setting: Setting) -> Picture | None:
    """The paper's Figure 1 for every kind of model; None where nothing is sent."""
    kinds = [kind for kind in study.kinds_of(setting) if kind != "finetuned"]
    rows = study.rows_of(setting)
    largest = max((measures.traffic(study.runs(row, setting)).mean for row in rows), default=0)
    if not kinds or not largest:
        return None
    byte, unit = traffic_unit(largest)
    figure = _panels(len(kinds), 3.1, 3.2, share_y=True)
    colors = row_colors(study)
    for axes, kind in zip(figure.axes, kinds, strict=True):
        paths: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for row in rows:
            runs = study.runs(row, setting)
            accuracy = measures.final_accuracy(runs, kind)
            if accuracy is None:
                continue
            sent = measures.traffic(runs).mean / byte
            paths.setdefault((row.method, row.mask), []).append((sent, accuracy.mean))
            axes.errorbar(
                sent, accuracy.mean, accuracy.std, color=colors[row], marker="o", markersize=5, linewidth=1.2
            )
            if sparsity := float(runs[0].summary["sparsity"]):
                axes.annotate(
                    f"{sparsity:g}", (sent, accuracy.mean), xytext=(5, 4), textcoords="offset points",
                    color=colors[row], fontsize=8,
                )  # fmt: skip
        for path in paths.values():
            axes.plot(*zip(*sorted(path), strict=True), color=FAINT, linewidth=1, zorder=0)
        axes.grid(color=FAINT, linewidth=0.6)
        axes.set_xlim(-0.04 * largest / byte, 1.1 * largest / byte)
        axes.set_xlabel(f"traffic of the run, {unit}")
        subtitle = f"{setting.label}: accuracy in % at the end"
        set_title(axes, f"{kind} models", subtitle if axes is figure.axes[0] else "")
    _legend(figure, rows, colors)
    bar = "; bar: one standard deviation over seeds" if len(study.seeds) > 1 else ""
    return Picture(
        f"traffic-{_slug(setting)}",
        f"{setting.label}: accuracy against traffic",
        f"Final mean accuracy over {study.mean_over} of the {_list(kinds)} models, a panel a kind, against all bytes "
        f"that the run sent, masks included. Numbers are sparsities{bar}.",
        figure,
    )


def client_accuracies(study: Study, setting: Setting) -> Picture | None:
    """How the clients' accuracies spread at the end; None where no run kept its clients."""
    kinds = study.kinds_of(setting)
    rows = [
        row for row in study.rows_of(setting) if any(len(run.clients) for run in study.runs(row, setting))
    ]
    if not kinds or not rows:
        return None
    figure = _panels(len(kinds), 2.7, 0.9 + 0.42 * len(rows), share_y=True)
    colors = row_colors(study)
    jitter = np.random.default_rng(0)
    for axes, kind in zip(figure.axes, kinds, strict=True):
        for height, row in enumerate(rows):
            columns = [run.clients.get(f"{kind}_accuracy", np.array([])) for run in study.runs(row, setting)]
            known = np.concatenate(columns)
            known = known[~np.isnan(known)]
            if not len(known):
                continue
            p10, low, middle, high, p90 = np.percentile(known, [10, 25, 50, 75, 90])
            spread = height + jitter.uniform(-0.28, 0.28, len(known))
            dots: dict[str, Any] = {"markersize": 4, "alpha": 0.4, "markeredgewidth": 0, "rasterized": True}
            axes.plot(known, spread, ".", color=colors[row], **dots)
            axes.plot([p10, p90], [height, height], color=colors[row], linewidth=1)
            axes.plot([low, high], [height, height], color=colors[row], linewidth=4, solid_capstyle="butt")
            axes.plot(middle, height, "o", color="white", markersize=5.5, markeredgecolor=colors[row])
        axes.grid(axis="x", color=FAINT, linewidth=0.6)
        axes.set_xlabel("accuracy in %")
        set_title(axes, f"{kind} models", f"{setting.label}: the clients" if axes is figure.axes[0] else "")
    _row_ticks(figure.axes[0], [row.label for row in rows])
    return Picture(
        f"clients-{_slug(setting)}",
        f"{setting.label}: accuracies of the clients",
        f"Each dot is one client in one seed at the end of the run, on its own test set, a panel for each of the "
        f"{_list(kinds)} models. Ring: median; thick line: middle half; thin line: 10th to 90th percentile.",
        figure,
    )


def mask_overlap(study: Study, setting: Setting) -> Picture | None:
    """Does the mask search find the clients that are alike? None where no run kept masks."""
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
        axes.plot(
            first.label_similarity, first.mask_overlap, ".", color=BLUE, alpha=alpha,
            markersize=5, markeredgewidth=0, rasterized=True,
        )  # fmt: skip
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
    return Picture(
        f"masks-{_slug(setting)}",
        f"{setting.label}: do alike clients find alike masks?",
        "Each dot is a pair of clients in the first seed: the share of their label distributions that both have, "
        "against the share of the weights that either mask keeps that both keep, over the tensors that are sparse. "
        "r is Pearson\u2019s, a value a seed; p is the largest of any seed in Mantel\u2019s test with "
        f"{masks.PERMUTATIONS} permutations of the clients. Masks also drift apart with every search, so clients that "
        f"were visited more often are less alike. {'; '.join(verdicts)}.",
        figure,
    )


def layer_densities(study: Study, setting: Setting) -> Picture | None:
    """How dense the masks leave the weights of each layer; None where no run kept masks."""
    shares: dict[Row, np.ndarray] = {}
    for row in study.rows_of(setting):
        if runs := [run for run in study.runs(row, setting) if run.has_masks]:
            shares[row], tensors = np.concatenate([masks.densities(run) for run in runs]), runs[0].tensors
    if not shares:
        return None
    layers = [(i, name.removesuffix(".weight")) for i, (name, shape) in enumerate(tensors) if len(shape) > 1]
    figure = _panels(1, 6.2, 0.9 + 0.28 * len(layers))
    axes, colors = figure.axes[0], row_colors(study)
    for place, (row, found) in enumerate(shares.items()):
        shift = 0.5 * (place + 0.5) / len(shares) - 0.25
        for height, (tensor, _) in enumerate(layers):
            low, high = np.percentile(found[:, tensor], [10, 90])
            axes.plot([low, high], [height + shift] * 2, color=colors[row], linewidth=1.2, alpha=0.6)
            axes.plot(found[:, tensor].mean(), height + shift, "o", color=colors[row], markersize=4.5)
    axes.set_xlim(0, 1.02)
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    _row_ticks(axes, [name for _, name in layers])
    set_title(
        axes, "Density of the masks", f"{setting.label}: share of active weights by layer, mean over clients"
    )
    _legend(figure, list(shares), colors)
    return Picture(
        f"density-{_slug(setting)}",
        f"{setting.label}: density by layer",
        "Share of each layer\u2019s weights, biases and norms left out, that the clients\u2019 last masks keep (those "
        "of their personal models): mean over clients and seeds; line: 10th to 90th percentile.",
        figure,
    )


def wall_time(study: Study, setting: Setting) -> Picture | None:
    """Seconds of training and mask search in a visit; None where no run kept its times."""
    rows, times = [], []
    for row in study.rows_of(setting):
        train, search = (
            measures.seconds_a_visit(study.runs(row, setting), phase) for phase in ("train", "search")
        )
        if train and search:
            rows.append(row)
            times.append((train.mean, search.mean))
    if not rows:
        return None
    figure = _panels(1, 6.2, 0.9 + 0.34 * len(rows))
    axes = figure.axes[0]
    for height, (train_s, search_s) in enumerate(times):
        axes.barh(height, train_s, height=0.55, color=BLUE)
        axes.barh(height, search_s, left=train_s, height=0.55, color=OCHRE)
        if train_s and search_s / train_s >= 0.005:
            axes.annotate(
                f"+{100 * search_s / train_s:.0f} %", (train_s + search_s, height), xytext=(5, 0),
                textcoords="offset points", color=OCHRE, fontsize=8, va="center",
            )  # fmt: skip
    axes.set_xlim(0, 1.12 * max(sum(pair) for pair in times))
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("seconds")
    _row_ticks(axes, [row.label for row in rows])
    subtitle = f"{setting.label}: training (blue) and mask search (ochre, in % of the training)"
    set_title(axes, "Wall time of a visit", subtitle)
    return Picture(
        f"time-{_slug(setting)}",
        f"{setting.label}: wall time of a visit",
        "Mean wall-clock seconds of one visit to one client, as the machines that ran the jobs took them.",
        figure,
    )


DRAWN = (accuracy_by_round, accuracy_by_traffic, client_accuracies, mask_overlap, layer_densities, wall_time)
"""Every figure of a data setting, in a report's order."""


def _panels(count: int, width: float, height: float, share_y: bool = False) -> Figure:
    """A figure of so many panels, each so large in inches, `PANELS_A_LINE` side by side."""
    columns = min(count, PANELS_A_LINE)
    lines = -(-count // columns)
    size = (width * columns + (1.4 if columns > 1 else 1.6), height * lines)
    figure, _ = new_figure(*size, heights=[1] * lines, columns=columns, share_y=share_y)
    for spare in figure.axes[count:]:
        spare.remove()
    return figure


def _legend(figure: Figure, rows: Sequence[Row], colors: dict[Row, str]) -> None:
    from matplotlib.lines import Line2D

    handles: list[Any] = [Line2D([], [], color=colors[row], linewidth=3, label=row.label) for row in rows]
    figure.legend(
        handles=handles,
        loc="outside right upper",
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=1,
    )


def _row_ticks(axes: Axes, labels: list[str]) -> None:
    """A label a row, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)


def _correlations(overlaps: list[masks.Overlap]) -> str:
    """`r = 0.22, 0.18, 0.41 (p = 0.034)`, the largest p of any seed."""
    if any(overlap.correlation is None for overlap in overlaps):
        equal = all(np.ptp(overlap.mask_overlap) < 1e-12 for overlap in overlaps)
        return "all masks overlap equally" if equal else "no correlation is defined"
    values = ", ".join(f"{overlap.correlation:.2f}".replace("-", "\u2212") for overlap in overlaps)
    return f"r = {values} (p = {max(overlap.p_value or 0 for overlap in overlaps):.3f})"


def _one_number(rows: list[Row]) -> bool:
    return all(len(row.varied) == 1 and row.varied[0][1].replace(".", "", 1).isdigit() for row in rows)


def _list(items: Sequence[object]) -> str:
    """a, b and c"""
    texts = [str(item) for item in items]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _slug(setting: Setting) -> str:
    text = setting.label.lower()
    return "-".join(part for part in "".join(c if c.isalnum() or c == "." else " " for c in text).split())
