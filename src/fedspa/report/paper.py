"""The paper's own printed values (paper.csv), beside a study's."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedspa.core.records import KINDS
from fedspa.report import measures
from fedspa.report.formats import MISSING, NONE, Cell, Column, Table
from fedspa.report.measures import OverSeeds
from fedspa.report.runs import Run
from fedspa.report.study import Row, Setting, Study
from fedspa.report.tables import not_reached, plus_minus, run_targets, seeds_text, slug

CLIENTS = 100
"""In every one of the paper's runs."""
UNITS = {"GB": 1e9, "1e14": 1e14, "1e16": 1e16}
DEFAULTS = {"mask.initial": "same", "mask.regrow": "gradient"}
"""Settings of all its printed cells, where a run has them."""


@dataclass(frozen=True)
class Printed:
    """One number as the paper prints it."""

    value: str
    """A number, >1000, or nothing for its dash."""
    std: str
    unit: str
    rounds: int
    """How many rounds its run had."""

    @property
    def text(self) -> str:
        return (f"{self.value} \u00b1 {self.std}" if self.std else self.value) or NONE

    @property
    def number(self) -> float | None:
        return float(self.value) if self.value and not self.value.startswith(">") else None


@cache
def printed_values() -> dict[tuple[str, ...], Printed]:
    """By (dataset, model, partition, gamma, method, mask, sparsity, layer sparsity, quantity, target).

    Quantities: accuracy (%), traffic, flops, rounds_to. A cell that two of its tables print counts as in the first.
    """
    names = ("dataset", "model", "partition", "gamma", "method", "mask", "sparsity", "layer_sparsity")
    values: dict[tuple[str, ...], Printed] = {}
    with Path(__file__).with_name("paper.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in (*names, "quantity", "target"))
            values.setdefault(key, Printed(row["value"], row["std"], row["unit"], int(row["rounds"])))
    return values


def printed(run: Run, quantity: str, target: float | None = None) -> Printed | None:
    """What the paper prints for a run's method and data setting; None where it has no such cell."""
    settings, summary = run.settings, run.summary
    changed = any(settings.get(key, default) != default for key, default in DEFAULTS.items())
    cut = settings.get("dataset.train_rows", "null") != "null"
    if changed or cut or summary["clients"] != CLIENTS:
        return None
    fedspa = summary["method"] == "fedspa"
    key = (
        *(summary[part] for part in ("dataset", "model", "partition")),
        settings.get("partition.gamma", "") if summary["partition"] == "dirichlet" else "",
        *(summary["method"], summary["mask"], f"{summary['sparsity']:g}"),
        settings.get("layer_sparsity.name", "") if fedspa else "",
        quantity,
        "" if target is None else f"{target:g}",
    )
    return printed_values().get(key)


def paper_tables(study: Study, targets: Sequence[float] = ()) -> list[Table]:
    """For each data setting of the paper: its printed accuracies, costs and rounds beside ours, with the difference."""
    tables = []
    for setting in study.settings:
        rows = [row for row in study.rows_of(setting) if printed(study.runs(row, setting)[0], "accuracy")]
        if rows:
            tables.append(_final_table(study, setting, rows))
            if rounds := _rounds_table(study, setting, rows, targets or run_targets(study.runs_of(setting))):
                tables.append(rounds)
    return tables


def _final_table(study: Study, setting: Setting, rows: list[Row]) -> Table:
    kinds = study.kinds_of(setting)
    columns = [Column("accuracy, %", name) for name in ("paper", *kinds)]
    columns += [Column(head, name) for head in ("traffic, GB", "FLOPs, 1e14") for name in ("paper", "ours")]
    lines = []
    for row in rows:
        runs = study.runs(row, setting)
        paper = {quantity: printed(runs[0], quantity) for quantity in ("accuracy", "traffic", "flops")}
        ours = (
            (measures.value_traffic(runs), 1e9, paper["traffic"]),
            (measures.flops(runs), 1e14, paper["flops"]),
        )
        cells = [_printed_cell(paper["accuracy"])]
        cells += [_beside(measures.final_accuracy(runs, kind), 1, paper["accuracy"], runs) for kind in kinds]
        for amount, unit, value in ours:
            cells += [_printed_cell(value, unit), _beside(amount, unit, value, runs)]
        lines.append((row.label, cells))
    caption = (
        f"The paper\u2019s printed values, and ours ({seeds_text(study)}) with the difference in brackets. The paper "
        "does not say which kind of model it tests, so every kind of ours stands beside it: its DST figures look like "
        "the local one, its RSM and FedAvg figures like the global one. Traffic is that of weights and updates, as the "
        f"paper counts it; FLOPs are counted as the runs\u2019 costs.convention says. {_cut(study, setting, rows)}"
    )
    return Table(
        f"paper-{slug(setting.label)}", f"{setting.label}: beside the paper", caption, columns, lines
    )


def _rounds_table(study: Study, setting: Setting, rows: list[Row], targets: Sequence[float]) -> Table | None:
    kinds = [kind for kind in study.kinds_of(setting) if kind != KINDS[-1]]
    known = [t for t in targets if any(printed(study.runs(row, setting)[0], "rounds_to", t) for row in rows)]
    if not known:
        return None
    columns = [Column(f"{target:g} %", name) for target in known for name in ("paper", *kinds)]
    lines = []
    for row in rows:
        runs = study.runs(row, setting)
        cells = []
        for target in known:
            value = printed(runs[0], "rounds_to", target)
            cells.append(_printed_cell(value))
            for kind in kinds:
                race = measures.race(runs, kind, target)
                rounds = race.over_seeds if race else None
                late = Cell(not_reached(race)) if race and not rounds else Cell(NONE)
                cells.append(_beside(rounds, 1, value) if rounds else late)
        lines.append((row.label, cells))
    caption = (
        f"First round with that accuracy: the paper\u2019s, and that of each kind of our models ({seeds_text(study)}) "
        "with the difference in brackets."
    )
    title = f"{setting.label}: rounds to an accuracy beside the paper"
    return Table(f"paper-rounds-{slug(setting.label)}", title, caption, columns, lines)


def _printed_cell(value: Printed | None, unit: float = 1) -> Cell:
    if value is None:
        return Cell(MISSING)
    if value.number is not None and UNITS.get(value.unit, 1) not in (1, unit):
        return Cell(f"{value.number * UNITS[value.unit] / unit:.0f}")  # printed in a coarser unit
    return Cell(value.text)


def _beside(ours: OverSeeds | None, unit: float, paper: Printed | None, runs: Sequence[Run] = ()) -> Cell:
    """`74.2 \u00b1 0.3 (\u22120.8)`; no difference to a run of another length."""
    if ours is None:
        return Cell(NONE)
    shown = OverSeeds(tuple(value / unit for value in ours.values))
    text = plus_minus(shown, 1)
    if paper is None or paper.number is None or any(run.limit != paper.rounds for run in runs):
        return Cell(text)
    difference = shown.mean - paper.number * UNITS.get(paper.unit, 1) / unit
    return Cell(f"{text} ({difference:+.1f})".replace("-", "\u2212"))


def _cut(study: Study, setting: Setting, rows: list[Row]) -> str:
    """Says so where our runs are not as long as the paper's."""
    ours = {run.limit for row in rows for run in study.runs(row, setting)}
    value = printed(study.runs(rows[0], setting)[0], "accuracy")
    if value is None or ours == {value.rounds}:
        return ""
    lengths = " or ".join(str(length) for length in sorted(ours))
    return f"Ours ran {lengths} rounds, the paper\u2019s {value.rounds}: final values have no difference to give."
