"""Several runs as one tidy table, for pandas, seaborn and the like."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from fedspa.core import names
from fedspa.core.records import KINDS
from fedspa.report.runs import Run, varied

COSTS = (names.TRAFFIC, names.FLOPS)
MEASURED = ("round", "kind", "metric", "value", *COSTS)
"""The columns after the run and its settings; docs/files.md describes them."""


def tidy(runs: Sequence[Run]) -> pd.DataFrame:
    """A row for each run, tested round, kind of model and metric.

    Columns: `run` (its name), each setting that varies, then `MEASURED`. `value` is the mean over clients, in percent;
    the costs are the run's total up to then.
    """
    settings = varied(runs)
    parts = [
        _measured(run).assign(run=run.name, **{name: run.settings.get(name) for name in settings})
        for run in runs
    ]
    return pd.concat(parts, ignore_index=True)[["run", *settings, *MEASURED]]


def _measured(run: Run) -> pd.DataFrame:
    """The columns `MEASURED` of one run, by round, then kind, then metric."""
    metrics = names.final_scores(run.summary)
    last = run.rounds.iloc[-1]
    parts = []
    for kind in KINDS:
        for metric, by_kind in metrics.items():
            if (column := names.score(metric, kind)) in run.rounds:
                part = run.rounds[["round", column, *COSTS]].rename(columns={column: "value"})
            elif kind == "finetuned" and kind in by_kind:
                flops = int(last[names.FLOPS]) + run.summary[names.FLOPS_FINETUNE]
                values = (int(last["round"]), by_kind[kind]["mean"], int(last[names.TRAFFIC]), flops)
                part = pd.DataFrame([values], columns=["round", "value", *COSTS])
            else:
                continue
            parts.append(part.assign(kind=kind, metric=metric).dropna(subset="value")[[*MEASURED]])
    parts = [part for part in parts if len(part)] or parts[:1]
    return pd.concat(parts).sort_values("round", kind="stable", ignore_index=True)
