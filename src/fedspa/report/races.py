"""Tables of how fast models reach an accuracy, or a rival's best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fedspa.report import numbers
from fedspa.report.cells import CURVES, fewer_seeds, lines_of, over, plus_minus, seeds_text, slug
from fedspa.report.numbers import Race, Seeds
from fedspa.report.runs import Run
from fedspa.report.study import Row, Setting, Study
from fedspa.report.table import NO_RUN, NO_VALUE, Cell, Column, Table

RIVALS = (("fedavg", "global"), ("fedavg", "local"), ("ditto", "personal"))
"""The methods whose best accuracy the others race to. The paper's are FedAvg's global and Ditto's personal model;
FedAvg's local model is the fair rival of any local model."""


def rounds_tables(
    study: Study, data: str, settings: list[Setting], targets: Sequence[float] = ()
) -> Iterator[Table]:
    """A table for each kind of model: the first round in which it had each target accuracy."""
    metric, unit = study.main_metric(settings[0]), " %" * study.runs_of(settings[0])[0].in_percent
    for kind in CURVES:
        columns = [
            Column(
                setting, f"{target:g}{unit}", _rounds_cell(study, setting, kind, target), "low",
                quantity="rounds_to", unit="rounds", kind=kind, target=f"{target:g}",
            )
            for setting in settings
            if kind in study.kinds_of(setting)
            for target in targets or run_targets(study.runs_of(setting))
        ]  # fmt: skip
        if not columns:
            continue
        rows = [row for row in study.rows if any(kind in study.kinds_in(row, s) for s in settings)]
        every = sorted(
            {run.settings.get("eval.every", "1") for s in settings for run in study.runs_of(s)}, key=int
        )
        grid = f"Tested every {' or '.join(every)} rounds. " if every != ["1"] else ""
        caption = (
            f"First round in which the {kind} models had that mean {metric} ({seeds_text(study)}). {grid}"
        )
        title = f"{data}: rounds to a goal in {metric}, {kind} models"
        yield Table.make(f"rounds-{slug(data)}-{kind}", title, caption, columns, lines_of(rows))


def rival_table(study: Study, data: str, settings: list[Setting]) -> Iterator[Table]:
    """The rounds that each method's models need to reach the best accuracy of `RIVALS`."""
    columns = [
        Column(
            setting, _goal(study, rival, setting, kind), _rival_cell(study, setting, rival, kind),
            quantity="rounds_to_best_of", unit="rounds", target=f"{rival.label} {kind}",
        )
        for setting in settings
        for method, kind in RIVALS
        for rival in study.rows_of(setting)
        if rival.method == method and kind in study.kinds_of(setting)
    ]  # fmt: skip
    if not columns or len(study.rows) < 2:
        return
    rows = [
        (f"{row.label}, {kind}", row, kind)
        for row in study.rows
        for kind in CURVES
        if any(kind in study.kinds_in(row, setting) for setting in settings)
    ]
    caption = (
        "First round in which a method\u2019s models of that kind had the rival\u2019s best accuracy, and how many "
        "more or fewer rounds that is than the rival itself needed. Each seed races against the rival\u2019s run "
        "with that seed. A local model is fresh from its client\u2019s data: beside a rival\u2019s global model, "
        "as the paper seems to set it, its lead is mostly that; FedAvg\u2019s local model is its fair rival."
    )
    title = f"{data}: rounds to a rival\u2019s best"
    yield Table.make(f"rivals-{slug(data)}", title, caption, columns, rows)


def _rounds_cell(study: Study, setting: Setting, kind: str, target: float) -> Callable[[Row, str], Cell]:
    """Cells such as `131.0 ± 4.2` or `>1000 (1/3)`."""

    def cell(runs: list[Run]) -> Cell:
        race = numbers.race(runs, kind, target)
        if race is None:
            return Cell(NO_VALUE)
        if race.seeds is None:
            return Cell(late(race), reached=race.reached)
        text = plus_minus(race.seeds, 1) + fewer_seeds(study, runs)
        return Cell(text, race.seeds, round(race.seeds.mean, 1), race.reached)

    return over(study, setting, cell)


def _rival_cell(study: Study, setting: Setting, rival: Row, rival_kind: str) -> Callable[[Row, str], Cell]:
    """Cells such as `131.0 (−25 %)`."""
    rivals = study.runs(rival, setting)

    def cell(row: Row, kind: str) -> Cell:
        runs = study.runs(row, setting)
        if not {run.seed for run in runs} & {run.seed for run in rivals}:
            return Cell(NO_RUN)
        found = numbers.rival_race(runs, kind, rivals, rival_kind)
        if found is None:
            return Cell(NO_VALUE)
        rounds, change = found.race.seeds, found.change
        if rounds is None or change is None:
            return Cell(late(found.race), reached=found.race.reached)
        sign = "+" if change > 0 else "\u2212" if change < 0 else "\u00b1"
        return Cell(f"{rounds.mean:.1f} ({sign}{abs(change):.0f} %)", rounds, reached=found.race.reached)

    return cell


def _goal(study: Study, rival: Row, setting: Setting, kind: str) -> str:
    """The rival's goal in words, such as `FedAvg global, 82.0 % in round 950.0`."""
    runs = study.runs(rival, setting)
    goals, rounds = zip(*(numbers.best(run, kind) for run in runs), strict=True)
    goal = f"{Seeds(goals).mean:.1f} %" if runs[0].in_percent else f"{Seeds(goals).mean:.3g}"
    return f"{rival.label} {kind}, {goal} in round {Seeds(rounds).mean:.1f}"


def run_targets(runs: Sequence[Run]) -> list[float]:
    """The target accuracies of the runs' own configs, ascending."""
    texts = {run.settings.get("eval.targets", "[]") for run in runs}
    return sorted({float(part) for text in texts for part in text.strip("[]").split(",") if part.strip()})


def late(race: Race) -> str:
    """`>1000 (1/3)`: how many of the seeds got there within the rounds; `>1000` where none did."""
    return f">{race.limit}" + (f" ({race.reached}/{len(race.rounds)})" if race.reached else "")
