"""results.csv: every number of a study's tables with all its digits, a row each, for whoever wants to compute on."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedspa.core.records import KINDS
from fedspa.report import measures
from fedspa.report.measures import OverSeeds
from fedspa.report.runs import Run
from fedspa.report.study import Row, Setting, Study
from fedspa.report.tables import run_targets

COLUMNS = (
    *(
        "dataset",
        "split",
        "row",
        "method",
        "mask",
        "sparsity",
        "density",
        "kind",
        "quantity",
        "target",
        "unit",
    ),
    *("mean", "std", "seeds", "reached"),
)


def write_results(path: Path, study: Study, targets: Sequence[float] = ()) -> None:
    """Write the file. A cell without runs has a row with 0 seeds and a blank mean; a race that some seed did not
    finish has a blank mean, and under `reached` how many did.
    """
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for setting in study.settings:
            for row in study.rows:
                head = {"dataset": setting.dataset, "split": setting.split, "row": row.label}
                head |= {"method": row.method, "mask": row.mask}
                for line in _lines(study, row, setting, targets):
                    writer.writerow(head | line)


def _lines(study: Study, row: Row, setting: Setting, targets: Sequence[float]) -> Iterator[dict[str, Any]]:
    runs = study.runs(row, setting)
    if not runs:
        yield {"quantity": "accuracy", "unit": "%", "seeds": 0}
        return
    head = {"sparsity": runs[0].summary["sparsity"], "seeds": len(runs)}
    if density := measures.density(runs):
        head["density"] = density.mean
    for metric in runs[0].metrics:
        for kind in KINDS:
            if score := measures.final_score(runs, kind, metric):
                yield head | {"kind": kind, "quantity": metric, "unit": "%"} | _numbers(score)
    yield head | {"quantity": "traffic", "unit": "bytes"} | _numbers(measures.traffic(runs))
    if encoded := measures.encoded_traffic(runs):
        yield head | {"quantity": "encoded_traffic", "unit": "bytes"} | _numbers(encoded)
    yield head | {"quantity": "flops", "unit": "FLOPs"} | _numbers(measures.flops(runs))
    if finetune := measures.finetune_flops(runs):
        yield head | {"quantity": "finetune_flops", "unit": "FLOPs"} | _numbers(finetune)
    for phase in ("train", "search"):
        if seconds := measures.seconds_a_visit(runs, phase):
            yield head | {"quantity": f"{phase}_time_a_visit", "unit": "s"} | _numbers(seconds)
    for kind in KINDS[:-1]:
        yield from (head | line for line in _races(study, setting, runs, kind, targets))


def _races(
    study: Study, setting: Setting, runs: list[Run], kind: str, targets: Sequence[float]
) -> Iterator[dict[str, Any]]:
    for target in targets or run_targets(study.runs_of(setting)):
        if race := measures.race(runs, kind, target):
            line = {"kind": kind, "quantity": "rounds_to", "target": f"{target:g}", "unit": "rounds"}
            yield line | _numbers(race.over_seeds) | {"reached": race.reached}
    for method, rival_kind in measures.RIVALS:
        for rival in (row for row in study.rows_of(setting) if row.method == method):
            if found := measures.rival_race(runs, kind, study.runs(rival, setting), rival_kind):
                line = {
                    "kind": kind,
                    "quantity": "rounds_to_best_of",
                    "target": f"{rival.label} {rival_kind}",
                }
                yield (
                    line | {"unit": "rounds", "reached": found.race.reached} | _numbers(found.race.over_seeds)
                )


def _numbers(values: OverSeeds | None) -> dict[str, float]:
    return {"mean": values.mean, "std": values.std} if values else {}
