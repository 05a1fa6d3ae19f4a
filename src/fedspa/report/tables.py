"""The tables of a study. Every accuracy and every round stands under the kind of model that it belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

import numpy as np

from fedspa.core import names
from fedspa.core.errors import listed
from fedspa.core.records import KINDS
from fedspa.report.labels import slug
from fedspa.report.runs import Run
from fedspa.report.study import Row, Setting, Study
from fedspa.report.table import Column, Table, seeds_text

CURVES = KINDS[:-1]
"""The kinds of model that have a score in each round."""
MODELS = {
    "global": "the server\u2019s dense weights, with the client\u2019s own personal layers if it has any",
    "personal": "what the method gives a client from the server\u2019s state",
    "local": "a client\u2019s weights right after its last training",
    "finetuned": "the final global weights, trained by each client once more",
}
RIVALS = (("fedavg", "global"), ("fedavg", "local"), ("ditto", "personal"))
"""The methods whose best accuracy the others race to. The paper's are FedAvg's global and Ditto's personal model;
FedAvg's local model is the fair rival of any local model."""
COSTS = {
    names.TRAFFIC: ("traffic", "bytes"),
    names.TRAFFIC_ENCODED: ("encoded", "bytes"),
    names.FLOPS: ("FLOPs", "FLOPs"),
    names.FLOPS_FINETUNE: ("fine-tuning FLOPs", "FLOPs"),
}
"""The heading and the unit of each cost in the main table; the encoded and the last one only if a run has it."""


def all_tables(study: Study, targets: Sequence[float] = ()) -> list[Table]:
    """The scores and costs first. `targets`: in the main metric, instead of those of the runs' configs."""
    by_data = [(data, list(group)) for data, group in groupby(study.settings, lambda setting: setting.data)]
    return [
        *(table for data in by_data for table in score_tables(study, *data)),
        *(worst_table(study, *data) for data in by_data),
        *details_table(study),
        *(table for data in by_data for table in rounds_table(study, *data, targets)),
        *(table for setting in study.settings for table in rival_table(study, setting)),
    ]


def score_tables(study: Study, data: str, settings: list[Setting]) -> Iterator[Table]:
    """Methods by partitions, a table for each metric: the score of each kind of model; costs beside the main one."""
    runs = [run for setting in settings for run in setting.runs]
    kinds = [kind for kind in KINDS if any(kind in run.kinds for run in runs)]
    largest = {name: max(run.summary.get(name) or 0 for run in runs) for name in COSTS}
    costs = [name for name in COSTS if largest[name] or name in (names.TRAFFIC, names.FLOPS)]
    models = " ".join(f"{kind}: {MODELS[kind]}." for kind in kinds)
    for metric in dict.fromkeys(metric for run in runs for metric in run.metrics):
        main = metric == runs[0].metrics[0]
        columns = [
            column
            for setting in settings
            for column in (
                *(score_column(setting, kind, metric) for kind in kinds),
                *(cost_column(setting, name, largest[name]) for name in costs if main),
            )
        ]
        caption = (
            f"{metric[0].upper()}{metric[1:]} at the end, by kind of model (mean over {study.mean_over}; "
            f"{seeds_text(study)}){', and the costs of a whole run, masks and mask search included' * main}. Best of "
            f"each column in bold. {models}"
            + f" FLOPs are counted in {flops_unit(largest[names.FLOPS])[1]} operations."
            * main
        )
        name = f"main-{slug(data)}" if main else f"{slug(metric)}-{slug(data)}"
        yield Table.make(study, name, f"{data}: {metric}{' and costs' * main}", caption, columns)


def worst_table(study: Study, data: str, settings: list[Setting]) -> Table:
    """The main metric of the worst clients, and the samples of a client update."""
    columns = [
        column
        for setting in settings
        for column in (
            *(
                score_column(setting, kind, setting.metric, "worst_decile")
                for kind in setting.kinds
            ),
            Column(
                setting, setting.split, "samples", lambda run: run.samples_per_update, 0,
                quantity="train/samples/per_update", unit="samples",
            ),
        )
    ]  # fmt: skip
    caption = (
        f"{metric_text(settings[0])} at the end, as the mean over the worst tenth of the clients "
        f"({seeds_text(study)}). Samples: those that a client update trained on, counted once in each epoch."
    )
    return Table.make(study, f"worst-{slug(data)}", f"{data}: worst decile of the clients", caption, columns)


def details_table(study: Study) -> Iterator[Table]:
    """Densities, and the seconds of a client update. A column is left out if it is 1 or unknown in all runs."""
    columns = [
        Column(setting, setting.label, name, value, digits, quantity=quantity, unit=unit)
        for setting in study.settings
        for name, value, digits, quantity, unit in (
            ("density asked", _summary("density_asked"), 3, "density_asked", ""),
            ("density", _summary(names.DENSITY), 3, names.DENSITY, ""),
            ("sparsest", _summary(f"{names.DENSITY}/min"), 3, f"{names.DENSITY}/min", ""),
            ("densest", _summary(f"{names.DENSITY}/max"), 3, f"{names.DENSITY}/max", ""),
            ("train, s", lambda run: run.seconds_per_update("train"), 3, "time/train_s/per_update", "s"),
            ("search, s", lambda run: run.seconds_per_update("search"), 3, "time/search_s/per_update", "s"),
        )
        if any(value(run) not in (None, 1) for run in setting.runs)
    ]
    if columns:
        cells = [cell for setting in study.settings for cell in setting.cells.items()]
        dense = sorted({row.name for row, runs in cells if runs[0].starts_dense})
        note = f" Clients of {listed(dense)} start with all weights and send fewer later on." if dense else ""
        caption = (
            "Density: the share of the parameters that are active, as asked for (1 \u2212 sparsity) and measured at "
            "the end in the trained clients\u2019 models: their mean, the sparsest and the densest one. Tensors that "
            "layer_sparsity.mask_scope leaves dense, and counts rounded down, make them differ from what was asked. "
            "Seconds: wall-clock time of training and of mask search in one client update; compare rows of one machine "
            f"only. A cell: {seeds_text(study)}.{note}"
        )
        yield Table.make(study, "details", "Density and wall time", caption, columns)


def rounds_table(
    study: Study, data: str, settings: list[Setting], targets: Sequence[float] = ()
) -> Iterator[Table]:
    """The first round in which each kind of model had each target score."""
    runs = [run for setting in settings for run in setting.runs]
    columns = [
        Column(
            setting, f"{setting.split}, {kind} models", f"{target:g}{names.unit(runs[0].summary)}",
            partial(Run.first_round, kind=kind, goal=target), best="low",
            quantity="rounds_to", unit="rounds", kind=kind, target=f"{target:g}",
        )
        for setting in settings
        for kind in setting.kinds
        if kind in CURVES
        for target in targets or setting.targets
    ]  # fmt: skip
    if columns:
        every = sorted({int(run.settings.get("eval.every", 1)) for run in runs})
        caption = (
            f"First round in which the models had that mean {runs[0].metrics[0]} ({seeds_text(study)})."
            + f" Tested every {' or '.join(map(str, every))} rounds." * (every != [1])
        )
        title = f"{data}: rounds to a goal in {runs[0].metrics[0]}"
        yield Table.make(study, f"rounds-{slug(data)}", title, caption, columns)


def rival_table(study: Study, setting: Setting) -> Iterator[Table]:
    """The rounds that each method's models need to reach the best score of `RIVALS`."""
    kinds = [kind for kind in setting.kinds if kind in CURVES]
    columns = [
        rival_column(setting, rival, rival_kind, kind)
        for method, rival_kind in RIVALS
        for rival in setting.rows
        if rival.method == method and any(run.best(rival_kind) for run in setting.runs_of(rival))
        for kind in kinds
    ]
    if columns and len(setting.rows) > 1:
        caption = (
            "First round in which a method\u2019s models of that kind had the rival\u2019s best accuracy, and how many "
            "more or fewer rounds that is than the rival itself needed. Each seed races against the rival\u2019s run "
            "with that seed. A local model is fresh from its client\u2019s data: beside a rival\u2019s global model, "
            "as the paper seems to set it, its lead is mostly that; FedAvg\u2019s local model is its fair rival."
        )
        title = f"{setting.label}: rounds to a rival\u2019s best"
        yield Table.make(study, f"rivals-{slug(setting.label)}", title, caption, columns, setting.rows)


def rival_column(setting: Setting, rival: Row, rival_kind: str, kind: str) -> Column:
    """Cells such as `131.0 (−25 %)`: the rounds, and how many more or fewer they are than the rival's own."""
    runs = setting.runs_of(rival)
    goals = {run.seed: best for run in runs if (best := run.best(rival_kind))}

    def value(run: Run) -> float | None:
        return run.first_round(kind, goals[run.seed][0]) if run.seed in goals else None

    def change(runs: Sequence[Run], mean: float) -> str:
        own = float(np.mean([goals[run.seed][1] for run in runs if value(run) is not None]))
        return signed(100 * (mean / own - 1), 0, " %")

    score, round = np.mean(list(goals.values()), axis=0)
    unit = setting.unit
    group = f"{rival.label} {rival_kind}, {names.shown(score, unit, 1)}{unit} in round {round:.1f}"
    return Column(
        setting, group, kind, value, note=change, quantity="rounds_to_best_of", unit="rounds", kind=kind,
        target=f"{rival.label} {rival_kind}",
    )  # fmt: skip


def _summary(name: str) -> Callable[[Run], float | None]:
    return lambda run: run.summary.get(name)


def score_column(setting: Setting, kind: str, metric: str, statistic: str = "mean") -> Column:
    """Cells such as `83.4 ± 0.1`. A mean has a note where clients are missing."""
    unit, main = setting.unit, statistic == "mean"

    def note(runs: Sequence[Run], _: float) -> str:
        tested = min(int(scores[kind]["clients"]) for run in runs if kind in (scores := run.scores(metric)))
        clients = int(runs[0].summary["clients"])
        return f" ({tested}/{clients})" if main and tested < clients else ""

    lower = any(names.is_error(run.summary, metric) for run in setting.runs)
    return Column(
        setting, setting.split, f"{kind}, %" if unit else kind, lambda run: run.score(metric, kind, statistic),
        1 if unit else 3, best="low" if lower else "high", note=note,
        quantity=metric if main else f"{metric}/{statistic}", unit=unit.strip(), kind=kind,
    )  # fmt: skip


def cost_column(setting: Setting, name: str, largest: float) -> Column:
    """A cost of the whole run in a unit that suits the largest one."""
    title, unit = COSTS[name]
    scale, word = traffic_unit(largest) if unit == "bytes" else flops_unit(largest)
    return Column(
        setting, setting.split, f"{title}, {word}", _summary(name), scale=scale, best="cost",
        quantity=name, unit=unit,
    )  # fmt: skip


def metric_text(setting: Setting) -> str:
    """The main metric and its unit at the beginning of a sentence: `Accuracy in %`."""
    metric = setting.metric
    return f"{metric[0].upper()}{metric[1:]}" + f" in{setting.unit}" * bool(setting.unit)


def signed(value: float, digits: int, unit: str = "") -> str:
    """` (−0.8)`: a difference, with a sign."""
    sign = "\u00b1" if not value else "+" if value > 0 else "\u2212"
    return f" ({sign}{abs(value):.{digits}f}{unit})"


def traffic_unit(largest: float) -> tuple[float, str]:
    """Bytes in a unit, and its name: the paper's GB (1e9) for large traffic."""
    return (1e9, "GB") if largest >= 1e9 else (1e6, "MB") if largest >= 1e6 else (1e3, "kB")


def flops_unit(largest: float) -> tuple[float, str]:
    """FLOPs in a unit, and its name: the paper's 1e14 for large ones, else a power of 1000."""
    exponent = 14 if largest >= 1e14 else 3 * int(math.log10(max(largest, 1)) // 3)
    return 10.0**exponent, f"1e{exponent}"
