"""Several runs as one tidy table, for pandas, seaborn and the like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fedspa.core import names
from fedspa.core.errors import written
from fedspa.core.records import KINDS
from fedspa.core.roles import Role, flat, role_of
from fedspa.tracking.run_folder import RunFiles

MEASURED = ("round", "kind", "metric", "value", names.TRAFFIC, names.FLOPS)
"""The columns after the run and its settings; docs/files.md says what they are."""


def tidy(runs: Sequence[RunFiles]) -> pd.DataFrame:
    """A row for each run, tested round, kind of model and metric.

    Columns: `run` (its name), each setting that varies, then `MEASURED`. `value` is the mean over clients, in percent;
    the costs are the run's total up to then.
    """
    settings = varied([settings_of(run) for run in runs])
    parts = []
    for run, values in zip(runs, settings, strict=True):
        part = _measured(run)
        for place, (name, value) in enumerate({"run": run.name, **values}.items()):
            part.insert(place, name, value)
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def settings_of(run: RunFiles) -> dict[str, Any]:
    """A run's settings by the names that a user types: training.lr, and of a group its choice, as method.

    Left out is what changes nothing that a run leaves.
    """
    found: dict[str, Any] = {}
    for key, value in flat(run.config).items():
        group, _, last = key.rpartition(".")
        if last == "_target_" or role_of(key) is Role.NEITHER:
            continue
        found[group if last == "name" else key] = written(value) if isinstance(value, list) else value
    return found | {"model": run.summary["model"]}  # with which one: timm:resnet18


def varied(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each run, the settings that have several values over all runs; None where it does not have one."""
    names = dict.fromkeys(name for of_run in settings for name in of_run)
    several = [name for name in names if len({of_run[name] for of_run in settings if name in of_run}) > 1]
    return [{name: of_run.get(name) for name in several} for of_run in settings]


def _measured(run: RunFiles) -> pd.DataFrame:
    """The columns `MEASURED` of one run, by round, then kind, then metric."""
    rounds, metrics = run.rounds, names.final_scores(run.summary)
    costs = {name: rounds[name] for name in (names.TRAFFIC, names.FLOPS)}
    parts = [
        pd.DataFrame(
            {"round": rounds["round"], "kind": kind, "metric": metric, "value": rounds[column], **costs}
        ).dropna(subset="value")
        for kind in KINDS
        for metric in metrics
        if (column := names.score(metric, kind)) in rounds
    ]
    last = rounds.iloc[-1]
    finetuned = [
        (
            int(last["round"]), "finetuned", metric, spread["mean"], int(rounds[names.TRAFFIC].iloc[-1]),
            int(rounds[names.FLOPS].iloc[-1]) + run.summary[names.FLOPS_FINETUNE],
        )
        for metric, by_kind in metrics.items()
        if (spread := by_kind.get("finetuned"))
    ]  # fmt: skip
    parts.append(pd.DataFrame(finetuned, columns=list(MEASURED)))
    parts = [part for part in parts if len(part)] or parts[:1]
    return pd.concat(parts).sort_values("round", kind="stable", ignore_index=True)
