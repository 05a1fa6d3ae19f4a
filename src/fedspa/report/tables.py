"""The tables of a study. Every accuracy and every round stands under the kind of model that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Literal

from fedspa.core import names
from fedspa.core.records import KINDS
from fedspa.report import numbers
from fedspa.report.cells import (
    fewer_seeds,
    flops_unit,
    lines_of,
    named,
    over,
    plus_minus,
    seeds_text,
    slug,
    traffic_unit,
)
from fedspa.report.numbers import Seeds
from fedspa.report.races import rival_table, rounds_tables
from fedspa.report.runs import Run
from fedspa.report.study import Setting, Study
from fedspa.report.table import NO_RUN, NO_VALUE, Cell, Column, Table

MODELS = {
    "global": "the server\u2019s dense weights",
    "personal": "what the method gives a client from the server\u2019s state",
    "local": "a client\u2019s weights right after its last training",
    "finetuned": "the final global weights, trained by each client once more",
}


def all_tables(study: Study, targets: Sequence[float] = ()) -> list[Table]:
    """The accuracies and costs first. `targets`: accuracies in percent, instead of those of the runs' configs."""
    by_data = [(data, list(group)) for data, group in groupby(study.settings, lambda setting: setting.data)]
    return [
        *(main_table(study, *data) for data in by_data),
        *density_table(study),
        *(table for data in by_data for table in metric_tables(study, *data)),
        *(table for data in by_data for table in rounds_tables(study, *data, targets)),
        *(table for data in by_data for table in rival_table(study, *data)),
        *time_table(study),
    ]


def main_table(study: Study, data: str, settings: list[Setting]) -> Table:
    """Methods by partitions: the accuracy of each kind of model, traffic and FLOPs."""
    kinds = [kind for kind in KINDS if any(kind in study.kinds_of(setting) for setting in settings)]
    everything = [run for setting in settings for run in study.runs_of(setting)]
    metric = study.main_metric(settings[0])
    costs = [("traffic", names.TRAFFIC, "bytes"), ("FLOPs", names.FLOPS, "FLOPs")]
    if any(run.summary.get(names.TRAFFIC_ENCODED) for run in everything):
        costs.insert(1, ("encoded", names.TRAFFIC_ENCODED, "bytes"))
    if "finetuned" in kinds:
        costs.append(("fine-tuning FLOPs", names.FLOPS_FINETUNE, "FLOPs"))
    columns = [
        column
        for setting in settings
        for column in (
            *(score_column(study, setting, kind, metric) for kind in kinds),
            *(_cost_column(study, setting, *cost, everything) for cost in costs),
        )
    ]
    models = " ".join(f"{kind}: {MODELS[kind]}." for kind in kinds)
    caption = (
        f"{named(study, settings[0])} at the end, by kind of model (mean over {study.mean_over}; {seeds_text(study)}), "
        f"and the costs of a whole run, masks and mask search included. Best of each column in bold. {models}"
    )
    title = f"{data}: {metric} and costs"
    return Table.make(f"main-{slug(data)}", title, caption, columns, lines_of(study.rows))


def density_table(study: Study) -> Iterator[Table]:
    """Methods by data settings, unless all models are dense by plan and by measure."""

    def asked(run: Run) -> float | None:
        return run.summary.get("density_asked") if names.DENSITY in run.summary else None

    def measured(runs: list[Run]) -> Cell:
        ends = [numbers.of_summary(runs, f"{names.DENSITY}/{end}") for end in ("min", "max")]
        if not all(ends):
            return Cell(NO_RUN)
        low, high = (f"{end(seeds.values):.4g}" for end, seeds in zip((min, max), ends, strict=True) if seeds)
        text = low if low == high else f"{low} to {high}"
        return Cell(text, numbers.of_summary(runs, names.DENSITY))

    def wanted(runs: list[Run]) -> Cell:
        seeds = numbers.of_runs(runs, asked)
        return Cell(f"{seeds.values[0]:.4g}", seeds) if seeds else Cell(NO_RUN)

    known = [run.summary for run in study.all_runs if names.DENSITY in run.summary]
    if all(summary["density_asked"] == summary[f"{names.DENSITY}/min"] == 1 for summary in known):
        return
    columns = [
        column
        for s in study.settings
        for column in (
            Column(s, "asked", over(study, s, wanted), quantity="density_asked", group=s.label),
            Column(s, "measured", over(study, s, measured), quantity=names.DENSITY, group=s.label),
        )
    ]
    caption = (
        "Share of the parameters that are active: as asked for (1 \u2212 sparsity), and as measured at the end of the "
        "run in the trained clients\u2019 models, from the sparsest to the densest of all seeds. Tensors that "
        "layer_sparsity.mask_scope leaves dense, and counts rounded down, make the two differ. Sub-FedAvg starts "
        "dense and prunes towards what was asked."
    )
    yield Table.make("density", "Density", caption, columns, lines_of(study.rows))


def metric_tables(study: Study, data: str, settings: list[Setting]) -> Iterator[Table]:
    """A table for each metric beside the main one: methods by partitions and kinds of model."""
    everything = [run for setting in settings for run in study.runs_of(setting)]
    for metric in dict.fromkeys(name for run in everything for name in run.metrics[1:]):
        columns = [score_column(study, s, kind, metric) for s in settings for kind in study.kinds_of(s)]
        caption = (
            f"{metric} at the end, by kind of model (mean over clients; {seeds_text(study)}). Best of each column in "
            "bold."
        )
        name, title = f"{slug(metric)}-{slug(data)}", f"{data}: {metric}"
        yield Table.make(name, title, caption, columns, lines_of(study.rows))


def time_table(study: Study) -> Iterator[Table]:
    """Seconds of training and mask search in a client update, if runs kept their times."""

    def cell(phase: str, digits: int = 3) -> Callable[[list[Run]], Cell]:
        def of(runs: list[Run]) -> Cell:
            seconds = numbers.seconds_per_update(runs, phase)
            if seconds is None:
                return Cell(NO_RUN)
            return Cell(plus_minus(seconds, digits) if seconds.mean else NO_VALUE, seconds)

        return of

    def share(runs: list[Run]) -> Cell:
        train, search = (numbers.seconds_per_update(runs, phase) for phase in ("train", "search"))
        if not train or not search:
            return Cell(NO_RUN)
        if not search.mean or not all(train.values):
            return Cell(NO_VALUE)
        shares = Seeds(tuple(100 * s / t for s, t in zip(search.values, train.values, strict=True)))
        return Cell(f"{plus_minus(shares, 1)} %")

    columns = [
        Column(
            setting, name, over(study, setting, of), group=setting.label,
            quantity=f"time/{phase}_s/per_update" if phase else "", unit="s",
        )
        for setting in study.settings
        if numbers.seconds_per_update(study.runs_of(setting), "search")
        for name, phase, of in (
            ("train, s", "train", cell("train")), ("search, s", "search", cell("search")),
            ("search / train", "", share),
        )
    ]  # fmt: skip
    if columns:
        caption = (
            f"Wall-clock seconds of one client update ({seeds_text(study)}), as the machines that ran the jobs took "
            "them: compare rows of one machine only."
        )
        title = "Wall time of training and mask search"
        yield Table.make("time", title, caption, columns, lines_of(study.rows))


def score_column(study: Study, setting: Setting, kind: str, metric: str) -> Column:
    """Cells such as `83.4 ± 0.1`, with a note where seeds or clients are missing."""
    first = study.runs_of(setting)[0]
    unit, digits = ("%", 1) if first.in_percent else ("", 3)

    def cell(runs: list[Run]) -> Cell:
        seeds = numbers.final_score(runs, kind, metric)
        if seeds is None:
            return Cell(NO_VALUE)
        tested = min(int(run.scores(metric)[kind]["clients"]) for run in runs)
        clients = int(runs[0].summary["clients"])
        notes = f" ({tested}/{clients})" * (tested < clients) + fewer_seeds(study, runs)
        return Cell(plus_minus(seeds, digits) + notes, seeds, round(seeds.mean, digits))

    best: Literal["high", "low"] = "low" if first.lower_is_better(metric) else "high"
    name = f"{kind}, %" if unit else kind
    return Column(setting, name, over(study, setting, cell), best, metric, unit, kind)


def _cost_column(
    study: Study, setting: Setting, title: str, name: str, unit: str, everything: list[Run]
) -> Column:
    """Cells with a cost in the unit that suits all runs; a cost of nothing is no candidate for the best."""
    largest = max(float(run.summary.get(name) or 0) for run in everything)
    size, word = traffic_unit(largest) if unit == "bytes" else flops_unit(largest)

    def cell(runs: list[Run]) -> Cell:
        seeds = numbers.of_summary(runs, name)
        if seeds is None:
            return Cell(NO_VALUE)
        shown = round(seeds.mean / size, 1)
        return Cell(f"{shown:.1f}" if seeds.mean else "0", seeds, shown if seeds.mean else None)

    return Column(setting, f"{title}, {word}", over(study, setting, cell), "low", name, unit)
