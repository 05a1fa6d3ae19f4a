"""The paper's own printed values (paper.csv), beside a study's."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedspa.core import names
from fedspa.core.records import ACCURACY
from fedspa.report import numbers
from fedspa.report.cells import CURVES, plus_minus, seeds_text, slug
from fedspa.report.numbers import Seeds
from fedspa.report.races import late, run_targets
from fedspa.report.runs import Run
from fedspa.report.study import Row, Setting, Study
from fedspa.report.table import NO_RUN, NO_VALUE, Cell, Column, Table

CLIENTS = 100
"""The number of clients in each of the paper's runs."""
UNITS = {"GB": 1e9, "1e14": 1e14, "1e16": 1e16}
DEFAULTS = {"mask.initial": "same", "mask.regrow": "gradient"}
"""Settings of all printed cells, where a run has them."""


@dataclass(frozen=True)
class Printed:
    """One number as the paper prints it."""

    value: str
    """A number, >1000, or nothing for the paper's dash."""
    std: str
    unit: str
    rounds: int
    """The number of rounds of its run."""

    @property
    def text(self) -> str:
        return (f"{self.value} \u00b1 {self.std}" if self.std else self.value) or NO_VALUE

    @property
    def number(self) -> float | None:
        """The number in percent, rounds, bytes or FLOPs."""
        known = self.value and not self.value.startswith(">")
        return float(self.value) * UNITS.get(self.unit, 1) if known else None


@cache
def printed_values() -> dict[tuple[str, ...], Printed]:
    """By (dataset, model, partition, gamma, method, mask, sparsity, layer sparsity, quantity, target).

    Quantities: accuracy (%), traffic, flops, rounds_to. A cell that two of its tables print counts as in the first.
    """
    keys = ("dataset", "model", "partition", "gamma", "method", "mask", "sparsity", "layer_sparsity")
    values: dict[tuple[str, ...], Printed] = {}
    with Path(__file__).with_name("paper.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in (*keys, "quantity", "target"))
            values.setdefault(key, Printed(row["value"], row["std"], row["unit"], int(row["rounds"])))
    return values


def printed(run: Run, quantity: str, target: float | None = None) -> Printed | None:
    """The paper's value for a run's method and data setting; None where it has no such cell."""
    settings, summary = run.settings, run.summary
    changed = any(settings.get(key, default) != default for key, default in DEFAULTS.items())
    cut = settings.get("dataset.train_rows", "null") != "null"
    if changed or cut or summary["clients"] != CLIENTS:
        return None
    key = (
        *(summary[part] for part in ("dataset", "model", "partition")),
        settings.get("partition.gamma", "") if summary["partition"] == "dirichlet" else "",
        *(summary["method"], summary["mask"], f"{summary['sparsity']:g}"),
        settings.get("layer_sparsity.name", "") if summary["method"] == "fedspa" else "",
        quantity,
        "" if target is None else f"{target:g}",
    )
    return printed_values().get(key)


def paper_tables(study: Study, targets: Sequence[float] = ()) -> list[Table]:
    """For each data setting of the paper: its printed accuracies, costs and rounds beside ours, with the difference."""
    tables: list[Table] = []
    for setting in study.settings:
        rows = [row for row in study.rows_of(setting) if printed(study.runs(row, setting)[0], "accuracy")]
        if rows:
            tables.append(_final_table(study, setting, rows))
            tables += _rounds_table(study, setting, rows, targets or run_targets(study.runs_of(setting)))
    return tables


def _final_table(study: Study, setting: Setting, rows: list[Row]) -> Table:
    def column(
        group: str,
        name: str,
        quantity: str,
        ours: Callable[[list[Run]], Seeds | None] | None,
        unit: float = 1,
    ) -> Column:
        def cell(row: Row, _: str) -> Cell:
            runs = study.runs(row, setting)
            paper = printed(runs[0], quantity)
            if ours is None:
                return _printed_cell(paper, unit)
            same_length = all(paper and run.limit == paper.rounds for run in runs)
            return _beside(ours(runs), paper if same_length else None, unit)

        return Column(setting, name, cell, group=group)

    def accuracy(kind: str) -> Callable[[list[Run]], Seeds | None]:
        return lambda runs: numbers.final_score(runs, kind, ACCURACY)

    columns = [
        column("accuracy, %", "paper", "accuracy", None),
        *(column("accuracy, %", kind, "accuracy", accuracy(kind)) for kind in study.kinds_of(setting)),
        column("traffic, GB", "paper", "traffic", None, 1e9),
        column("traffic, GB", "ours", "traffic", _weights_traffic, 1e9),
        column("FLOPs, 1e14", "paper", "flops", None, 1e14),
        column("FLOPs, 1e14", "ours", "flops", lambda runs: numbers.of_summary(runs, names.FLOPS), 1e14),
    ]
    caption = (
        f"The paper\u2019s printed values, and ours ({seeds_text(study)}) with the difference in brackets. The paper "
        "does not say which kind of model it tests, so every kind of ours stands beside it: its DST figures look like "
        "the local one, its RSM and FedAvg figures like the global one. Traffic is that of weights and updates, as the "
        f"paper counts it; FLOPs are counted as the runs\u2019 costs.convention says. {_cut(study, setting, rows)}"
    )
    title = f"{setting.label}: beside the paper"
    return Table.make(
        f"paper-{slug(setting.label)}", title, caption, columns, [(row.label, row, "") for row in rows]
    )


def _rounds_table(
    study: Study, setting: Setting, rows: list[Row], targets: Sequence[float]
) -> Iterator[Table]:
    def column(target: float, kind: str) -> Column:
        def cell(row: Row, _: str) -> Cell:
            runs = study.runs(row, setting)
            paper = printed(runs[0], "rounds_to", target)
            if not kind:
                return _printed_cell(paper)
            race = numbers.race(runs, kind, target)
            if race and not race.seeds:
                return Cell(late(race))
            return _beside(race.seeds if race else None, paper)

        return Column(setting, kind or "paper", cell, group=f"{target:g} %")

    known = [t for t in targets if any(printed(study.runs(row, setting)[0], "rounds_to", t) for row in rows)]
    kinds = ["", *(kind for kind in study.kinds_of(setting) if kind in CURVES)]
    if known:
        caption = (
            f"First round with that accuracy: the paper\u2019s, and that of each kind of our models "
            f"({seeds_text(study)}) with the difference in brackets."
        )
        title = f"{setting.label}: rounds to an accuracy beside the paper"
        columns = [column(target, kind) for target in known for kind in kinds]
        lines = [(row.label, row, "") for row in rows]
        yield Table.make(f"paper-rounds-{slug(setting.label)}", title, caption, columns, lines)


def _weights_traffic(runs: list[Run]) -> Seeds | None:
    """Bytes of weights and updates alone, as the paper counts."""
    parts = ("cost/traffic_down_bytes", "cost/traffic_up_bytes")
    return numbers.of_runs(runs, lambda run: sum(run.summary[part] for part in parts))


def _printed_cell(paper: Printed | None, unit: float = 1) -> Cell:
    if paper is None:
        return Cell(NO_RUN)
    if paper.number is not None and UNITS.get(paper.unit, 1) not in (1, unit):
        return Cell(f"{paper.number / unit:.0f}")  # printed in a coarser unit
    return Cell(paper.text)


def _beside(ours: Seeds | None, paper: Printed | None, unit: float = 1) -> Cell:
    """A cell such as `74.2 ± 0.3 (−0.8)`: our value, and its difference from the paper's."""
    if ours is None:
        return Cell(NO_VALUE)
    shown = Seeds(tuple(value / unit for value in ours.values))
    text = plus_minus(shown, 1)
    if paper is None or paper.number is None:
        return Cell(text)
    return Cell(f"{text} ({shown.mean - paper.number / unit:+.1f})".replace("-", "\u2212"))


def _cut(study: Study, setting: Setting, rows: list[Row]) -> str:
    """A sentence where our runs are not as long as the paper's."""
    ours = {run.limit for row in rows for run in study.runs(row, setting)}
    value = printed(study.runs(rows[0], setting)[0], "accuracy")
    if value is None or ours == {value.rounds}:
        return ""
    lengths = " or ".join(map(str, sorted(ours)))
    return f"Ours ran {lengths} rounds, the paper\u2019s {value.rounds}: final values have no difference to give."
