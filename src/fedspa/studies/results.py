"""The results of a study: the outcome of each job, and tables of the final scores."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspa.core import names
from fedspa.core.records import KINDS

if TYPE_CHECKING:
    import pandas as pd


def _final_means(folder: Path) -> tuple[str, str, dict[str, float]]:
    """The main metric of a finished run, its unit, and the final mean of each kind of model."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    metric = names.main_metric(summary)
    found = {kind: summary.get(names.final(names.score(metric, kind))) for kind in KINDS}
    return metric, names.unit(summary), {kind: mean for kind, mean in found.items() if mean is not None}


def outcome(folder: Path) -> str:
    """A finished run in a few words."""
    _, unit, found = _final_means(folder)
    words = [f"{kind} {names.shown(mean, unit, 1)}{unit}" for kind, mean in found.items()]
    return ", ".join(words) or "finished"


def scores(finished: Iterable[tuple[str, Path]]) -> list[pd.DataFrame]:
    """The final scores of finished jobs, a table for each main metric, which is the name of its columns.

    A table has a row for each job under its label, and a column for each kind of model; NaN where a job has no such
    model. Its `attrs` hold the unit of the scores: " %", or "" if they have none.

    Args:
        finished: the label and folder of each job. Jobs with the same label differ only in their seed.
    """
    import pandas as pd

    found: dict[tuple[str, str], list[tuple[str, dict[str, float]]]] = {}
    for label, folder in finished:
        metric, unit, of_kinds = _final_means(folder)
        if of_kinds:
            found.setdefault((metric, unit), []).append((label, of_kinds))
    tables = []
    for (metric, unit), jobs in found.items():
        labels, rows = zip(*jobs, strict=True)
        title = f"{metric}{unit and f' in{unit}'}"
        tables.append(pd.DataFrame(rows, index=labels).filter(KINDS).rename_axis(columns=title))
        tables[-1].attrs["unit"] = unit
    return tables


def means(runs: pd.DataFrame) -> pd.DataFrame:
    """The number of runs of each label of such a table, and their means as text."""
    grouped = runs.groupby(level=0, sort=False)
    shown = grouped.mean().map(lambda mean: names.shown(mean, runs.attrs["unit"]) if mean == mean else "-")
    shown.insert(0, "runs", grouped.size())
    return shown.rename_axis(columns=f"mean {runs.columns.name}")
