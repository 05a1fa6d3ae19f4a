"""A study's tables. Every accuracy and every round stands under the kind of model that it belongs to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from fedspa.core.records import ACCURACY, KINDS
from fedspa.report import measures
from fedspa.report.formats import MISSING, NONE, Cell, Column, Table
from fedspa.report.measures import OverSeeds, Race
from fedspa.report.runs import Run
from fedspa.report.study import Row, Setting, Study

MODELS = (
    "global: the server\u2019s dense weights. personal: what the method gives a client from the server\u2019s state. "
    "local: a client\u2019s weights right after its last training. "
    "finetuned: the final global weights, trained by each client once more."
)
LEGEND = f"\u201c{NONE}\u201d: there is no such model, or no count; \u201c{MISSING}\u201d: there is no finished run."


def main_tables(study: Study) -> list[Table]:
    """A table a data set: methods by partitions, with the accuracy of each kind of model, traffic and FLOPs."""
    tables = []
    for data, settings in _by_data(study):
        kinds = [kind for kind in KINDS if any(kind in study.kinds_of(setting) for setting in settings)]
        everything = [run for setting in settings for run in study.runs_of(setting)]
        byte, byte_unit = traffic_unit(max(measures.traffic(everything).values))
        counted = [run.summary["flops"]["total"] or 0 for run in everything]
        flop, flop_unit = flops_unit(max(counted))
        columns = [
            column
            for setting in settings
            for column in (
                *(Column(setting.split, f"{kind}, %", "high") for kind in kinds),
                Column(setting.split, f"traffic, {byte_unit}", "low"),
                Column(setting.split, f"FLOPs, {flop_unit}", "low"),
            )
        ]
        extra = _finetuning_text(study, settings)
        rows = []
        for row in study.rows:
            cells: list[Cell] = []
            for setting in settings:
                runs = study.runs(row, setting)
                cells += [score_cell(study, runs, kind) for kind in kinds]
                cells.append(amount_cell(measures.traffic(runs), byte) if runs else Cell(MISSING))
                cells.append(amount_cell(measures.flops(runs), flop) if runs else Cell(MISSING))
            rows.append((row.label, cells))
        caption = (
            f"Accuracy in % at the end, by kind of model (mean over {study.mean_over}; {seeds_text(study)}), and the "
            f"costs of a whole run, masks and mask search included{extra}. {MODELS} Best of each column in bold. "
            f"(18/20): so many of all clients have such a model, as a local one needs a visit. {LEGEND}"
        )
        tables.append(Table(f"main-{slug(data)}", f"{data}: accuracy and costs", caption, columns, rows))
    return tables


def metric_tables(study: Study) -> list[Table]:
    """A table for each data set and each metric beside accuracy: methods by partitions and kinds of model."""
    tables = []
    for data, settings in _by_data(study):
        everything = [run for setting in settings for run in study.runs_of(setting)]
        columns = [(setting, kind) for setting in settings for kind in study.kinds_of(setting)]
        for metric in list(dict.fromkeys(name for run in everything for name in run.metrics))[1:]:
            rows = [
                (row.label, [score_cell(study, study.runs(row, s), kind, metric) for s, kind in columns])
                for row in study.rows
            ]
            caption = (
                f"{metric} in % at the end, by kind of model (mean over clients; {seeds_text(study)}). Best of each "
                f"column in bold. {LEGEND}"
            )
            heads = [Column(setting.split, f"{kind}, %", "high") for setting, kind in columns]
            tables.append(Table(f"{slug(metric)}-{slug(data)}", f"{data}: {metric}", caption, heads, rows))
    return tables


def _finetuning_text(study: Study, settings: list[Setting]) -> str:
    """What fine-tuning adds to a run's FLOPs, where runs were fine-tuned: no column, for it is no part of training."""
    if not any("finetuned" in study.kinds_of(setting) for setting in settings):
        return ""
    shares = [
        100 * float(run.summary["flops"]["finetune"]) / float(run.summary["flops"]["dense_total"])
        for setting in settings
        for run in study.runs_of(setting)
        if run.summary["flops"].get("finetune") and run.summary["flops"].get("dense_total")
    ]
    if not shares:
        return ", fine-tuning not"
    low, high = f"{min(shares):.1f}", f"{max(shares):.1f}"
    return (
        f", fine-tuning not (it costs {low if low == high else f'{low} to {high}'} % of dense training more)"
    )


def rounds_tables(study: Study, targets: Sequence[float] = ()) -> list[Table]:
    """A table for each data set and kind of model: rounds to each target (default: those of the runs' configs)."""
    tables = []
    for data, settings in _by_data(study):
        for kind in KINDS[:-1]:
            columns, wanted = [], []
            for setting in settings:
                if kind in study.kinds_of(setting):
                    wanted += [(setting, target) for target in targets or run_targets(study.runs_of(setting))]
            columns = [Column(setting.split, f"{target:g} %", "low") for setting, target in wanted]
            rows = [
                (
                    row.label,
                    [
                        rounds_cell(study, study.runs(row, setting), kind, target)
                        for setting, target in wanted
                    ],
                )
                for row in study.rows
                if any(kind in run.kinds for setting in settings for run in study.runs(row, setting))
            ]
            if not columns:
                continue
            caption = (
                f"First round in which the {kind} models had that mean accuracy ({seeds_text(study)}). >20 (1/3): not "
                f"every seed got there within 20 rounds, 1 of 3 did. {_grid(study, settings)}{LEGEND}"
            )
            title = f"{data}: rounds to an accuracy, {kind} models"
            tables.append(Table(f"rounds-{slug(data)}-{kind}", title, caption, columns, rows))
    return tables


def rival_tables(study: Study) -> list[Table]:
    """A table a data set: rounds that each method's models need to reach the best accuracy of `measures.RIVALS`."""
    tables = []
    for data, settings in _by_data(study):
        races = [
            (setting, rival, kind)
            for setting in settings
            for method, kind in measures.RIVALS
            for rival in study.rows_of(setting)
            if rival.method == method and kind in study.kinds_of(setting)
        ]
        if not races or len(study.rows) < 2:
            continue
        columns = [
            Column(setting.split, _goal(study, rival, setting, kind)) for setting, rival, kind in races
        ]
        rows = [
            (
                f"{row.label}, {kind}",
                [
                    _rival_cell(study.runs(row, s), kind, study.runs(rival, s), theirs)
                    for s, rival, theirs in races
                ],
            )
            for row in study.rows
            for kind in KINDS[:-1]
            if any(kind in run.kinds for setting in settings for run in study.runs(row, setting))
        ]
        caption = (
            "First round in which a method\u2019s models of that kind had the rival\u2019s best accuracy, and how many "
            "more or fewer rounds that is than the rival itself needed. Each seed races against the rival\u2019s run "
            "with that seed. A local model is fresh from its client\u2019s data: beside a rival\u2019s global model, "
            "as the paper seems to set it, its lead is mostly that; FedAvg\u2019s local model is its fair rival. "
            f">20 (1/3): not every seed got there within 20 rounds, 1 of 3 did. {LEGEND}"
        )
        tables.append(
            Table(f"rivals-{slug(data)}", f"{data}: rounds to a rival\u2019s best", caption, columns, rows)
        )
    return tables


def time_table(study: Study) -> Table | None:
    """Seconds of training and mask search in a visit; None where no run kept its times."""
    columns, rows = [], []
    settings = [s for s in study.settings if measures.seconds_a_visit(study.runs_of(s), "search")]
    for setting in settings:
        columns += [Column(setting.label, name) for name in ("train, s", "search, s", "search / train")]
    for row in study.rows:
        cells: list[Cell] = []
        for setting in settings:
            runs = study.runs(row, setting)
            train, search = (measures.seconds_a_visit(runs, phase) for phase in ("train", "search"))
            if train is None or search is None:
                cells += [Cell(MISSING)] * 3
                continue
            searches = search.mean > 0
            share = OverSeeds(
                tuple(100 * s / t for s, t in zip(search.values, train.values, strict=True) if t)
            )
            cells += [
                Cell(plus_minus(train, 3)),
                Cell(plus_minus(search, 3) if searches else NONE),
                Cell(f"{plus_minus(share, 1)} %" if searches and share.values else NONE),
            ]
        rows.append((row.label, cells))
    if not settings:
        return None
    caption = (
        f"Wall-clock seconds of one visit to one client ({seeds_text(study)}), as the machines that ran the jobs took "
        f"them: compare rows of one machine only. \u201c{NONE}\u201d: no mask is searched."
    )
    return Table("time", "Wall time of training and mask search", caption, columns, rows)


def run_targets(runs: list[Run]) -> list[float]:
    """The target accuracies of the runs' own configs, ascending."""
    texts = {run.settings.get("eval.targets", "[]") for run in runs}
    return sorted(
        {float(target) for text in texts for target in text.strip("[]").split(",") if target.strip()}
    )


def score_cell(study: Study, runs: list[Run], kind: str, metric: str = ACCURACY) -> Cell:
    """`83.4 \u00b1 0.1`, with a note where seeds or clients are missing."""
    if not runs:
        return Cell(MISSING)
    score = measures.final_score(runs, kind, metric)
    if score is None:
        return Cell(NONE)
    tested, clients = measures.tested_clients(runs, kind)
    notes = f" ({tested}/{clients})" * (tested < clients) + seeds_note(study, runs)
    return Cell(plus_minus(score, 1) + notes, round(score.mean, 1))


def amount_cell(amount: OverSeeds | None, unit: float) -> Cell:
    """A cost in its unit; one of nothing at all is no rival of the others."""
    if amount is None:
        return Cell(NONE)
    shown = round(amount.mean / unit, 1)
    return Cell(f"{shown:.1f}" if amount.mean else "0", shown if amount.mean else None)


def rounds_cell(study: Study, runs: list[Run], kind: str, target: float) -> Cell:
    """`131.0 \u00b1 4.2`, or `>1000 (1/3)`."""
    if not runs:
        return Cell(MISSING)
    race = measures.race(runs, kind, target)
    if race is None:
        return Cell(NONE)
    rounds = race.over_seeds
    if rounds is None:
        return Cell(not_reached(race))
    return Cell(plus_minus(rounds, 1) + seeds_note(study, runs), round(rounds.mean, 1))


def not_reached(race: Race) -> str:
    """`>1000 (1/3)`: how many of the seeds got there within the rounds; with one seed or none, `>1000`."""
    return f">{race.limit}" + (f" ({race.reached}/{len(race.rounds)})" if race.reached else "")


def traffic_unit(largest: float) -> tuple[float, str]:
    """Bytes in a unit, and its name: the paper's GB (1e9) where something is so large."""
    return (1e9, "GB") if largest >= 1e9 else (1e6, "MB") if largest >= 1e6 else (1e3, "kB")


def flops_unit(largest: float) -> tuple[float, str]:
    """FLOPs in a unit, and its name: the paper's 1e14 where something is so large, else a power of 1000."""
    exponent = 14 if largest >= 1e14 else 3 * int(math.log10(max(largest, 1)) // 3)
    return 10.0**exponent, f"1e{exponent}"


def seeds_note(study: Study, runs: list[Run]) -> str:
    """` [2 seeds]` where a cell has fewer seeds than the study."""
    few = len(runs) < len(study.seeds)
    return f" [{len(runs)} seed{'s' * (len(runs) > 1)}]" if few else ""


def _rival_cell(runs: list[Run], kind: str, rivals: list[Run], rival_kind: str) -> Cell:
    if not runs or not rivals:
        return Cell(MISSING)
    found = measures.rival_race(runs, kind, rivals, rival_kind)
    if found is None:
        return Cell(NONE if {r.seed for r in runs} & {r.seed for r in rivals} else MISSING)
    rounds, change = found.race.over_seeds, found.change
    if rounds is None or change is None:
        return Cell(not_reached(found.race))
    sign = "+" if change > 0 else "\u2212" if change < 0 else "\u00b1"
    return Cell(f"{rounds.mean:.1f} ({sign}{abs(change):.0f} %)", round(rounds.mean, 1))


def _goal(study: Study, rival: Row, setting: Setting, kind: str) -> str:
    """`FedAvg global, 82.0 % in round 950.0`."""
    goals = [measures.best(run, kind) for run in study.runs(rival, setting)]
    accuracy, rounds = (
        OverSeeds(tuple(float(value) for value in column)).mean for column in zip(*goals, strict=True)
    )
    return f"{rival.label} {kind}, {accuracy:.1f} % in round {rounds:.1f}"


def _by_data(study: Study) -> list[tuple[str, list[Setting]]]:
    return [
        (data, list(settings)) for data, settings in groupby(study.settings, key=lambda setting: setting.data)
    ]


def _grid(study: Study, settings: list[Setting]) -> str:
    """How finely rounds are known: between tests a run tells no scores, not even those of local models."""
    every = {
        run.settings.get("eval.every", "1") for setting in settings for run in study.runs_of(setting)
    } - {"1"}
    if not every:
        return ""
    return f"Tested every {' or '.join(sorted(every, key=int))} rounds. "


def seeds_text(study: Study) -> str:
    seeds = study.seeds
    if len(seeds) == 1:
        return f"one seed, {seeds[0]}"
    return f"mean \u00b1 standard deviation over the seeds {', '.join(map(str, seeds))}"


def plus_minus(values: OverSeeds, digits: int) -> str:
    spread = f" \u00b1 {values.std:.{digits}f}" if len(values.values) > 1 else ""
    return f"{values.mean:.{digits}f}{spread}"


def slug(text: str) -> str:
    return "".join(char if char.isalnum() else "-" for char in text.lower()).strip("-")
