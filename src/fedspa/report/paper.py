"""The paper's own printed values (paper.csv), beside a study's."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from fedspa.core import names
from fedspa.core.records import ACCURACY
from fedspa.report.labels import slug
from fedspa.report.runs import Run
from fedspa.report.study import Row, Setting, Study
from fedspa.report.table import NO_RUN, NO_VALUE, Column, Table, seeds_text
from fedspa.report.tables import CURVES, signed

Values = Mapping[str, Callable[[Run], float | None]]

CLIENTS = 100
"""The number of clients in each of the paper's runs."""
UNITS = {"GB": 1e9, "1e14": 1e14, "1e16": 1e16}
DEFAULTS = {"mask.initial": "same", "mask.regrow": "gradient", "dataset.train_rows": None}
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
    if changed or summary["clients"] != CLIENTS:
        return None
    key = (
        *(summary[part] for part in ("dataset", "model", "partition")),
        str(settings.get("partition.gamma", "")) if summary["partition"] == "dirichlet" else "",
        *(summary["method"], summary["mask"], f"{summary['sparsity']:g}"),
        settings.get("layer_sparsity", "") if summary["method"] == "fedspa" else "",
        quantity,
        "" if target is None else f"{target:g}",
    )
    return printed_values().get(key)


def paper_tables(study: Study, targets: Sequence[float] = ()) -> Iterator[Table]:
    """For each data setting of the paper: its printed accuracies, costs and rounds beside ours, with the difference."""
    for setting in study.settings:
        rows = [row for row in setting.rows if printed(setting.runs_of(row)[0], "accuracy")]
        if not rows:
            continue
        runs, kinds = [setting.runs_of(row)[0] for row in rows], setting.kinds
        scores: Values = {kind: partial(Run.score, metric=ACCURACY, kind=kind) for kind in kinds}
        flops: Values = {"ours": lambda run: run.summary.get(names.FLOPS)}
        columns = [
            *_compared(setting, "accuracy, %", scores, "accuracy"),
            *_compared(setting, "traffic, GB", {"ours": _weights_traffic}, "traffic", 1e9),
            *_compared(setting, "FLOPs, 1e14", flops, "flops", 1e14),
        ]
        for goal in targets or setting.targets:
            if any(printed(run, "rounds_to", goal) for run in runs):
                rounds = {
                    kind: partial(Run.first_round, kind=kind, goal=goal) for kind in kinds if kind in CURVES
                }
                columns += _compared(setting, f"rounds to {goal:g} %", rounds, "rounds_to", target=goal)
        caption = (
            f"The paper\u2019s printed values, and ours ({seeds_text(study)}) with the difference in brackets. The "
            "paper does not say which kind of model it tests, so every kind of ours stands beside it: its DST figures "
            "look like the local one, its RSM and FedAvg figures like the global one. Traffic is that of weights and "
            "updates, as the paper counts it; FLOPs are counted as the runs\u2019 costs.convention says. "
            f"{_cut(setting, rows)}"
        )
        name, title = f"paper-{slug(setting.label)}", f"{setting.label}: beside the paper"
        yield Table.make(study, name, title, caption, columns, rows)


def _compared(
    setting: Setting, group: str, ours: Values, quantity: str, scale: float = 1, target: float | None = None
) -> Iterator[Column]:
    """A column of the paper's values as it prints them, then columns of ours such as `74.2 ± 0.3 (−0.8)`.

    A value at the end has a difference only if the runs are as long as the paper's.
    """

    def text(runs: Sequence[Run]) -> str:
        paper = printed(runs[0], quantity, target)
        if paper and paper.number is not None and UNITS.get(paper.unit, 1) not in (1, scale):
            return f"{paper.number / scale:.0f}"  # printed in a coarser unit
        return paper.text if paper else NO_RUN

    def difference(runs: Sequence[Run], mean: float) -> str:
        paper = printed(runs[0], quantity, target)
        comparable = paper and (target or all(run.limit == paper.rounds for run in runs))
        if not paper or not comparable or paper.number is None:
            return ""
        return signed((mean - paper.number) / scale, 1)

    yield Column(setting, group, "paper", lambda run: None, text=text)
    for name, value in ours.items():
        yield Column(setting, group, name, value, scale=scale, note=difference)


def _weights_traffic(run: Run) -> float:
    """Bytes of weights and updates alone, as the paper counts."""
    return sum(run.summary[part] for part in ("cost/traffic_down_bytes", "cost/traffic_up_bytes"))


def _cut(setting: Setting, rows: list[Row]) -> str:
    """A sentence where our runs are not as long as the paper's."""
    ours = {run.limit for row in rows for run in setting.runs_of(row)}
    value = printed(setting.runs_of(rows[0])[0], "accuracy")
    if value is None or ours == {value.rounds}:
        return ""
    lengths = " or ".join(map(str, sorted(ours)))
    return f"Ours ran {lengths} rounds, the paper\u2019s {value.rounds}: final values have no difference to give."
