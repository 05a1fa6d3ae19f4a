"""The results of a study: the outcome of each job, a table of means over seeds, and a picture of all runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Scores:
    """The final scores of a study's finished jobs by one metric."""

    title: str
    """The metric with its unit: accuracy in %."""
    unit: str
    runs: pd.DataFrame
    """A row for each job under its label, a column for each kind of model; NaN where a job has no such model."""

    def means(self) -> pd.DataFrame:
        """The number of runs of each label, and their means as text."""
        grouped = self.runs.groupby(level=0, sort=False)
        shown = grouped.mean().map(lambda mean: names.shown(mean, self.unit) if mean == mean else "-")
        shown.insert(0, "runs", grouped.size())
        return shown.rename_axis(index=None, columns=self.title)

    def rows(self) -> list[list[str]]:
        """The table of means: a head, and rows of cells."""
        means = self.means()
        body = [[str(label), *map(str, cells)] for label, *cells in means.itertuples()]
        return [[self.title, *means.columns], *body]


def scores(finished: Iterable[tuple[str, Path]]) -> list[Scores]:
    """The scores of finished jobs by main metric. Jobs with the same label differ only in their seed.

    Args:
        finished: the label and folder of each job.
    """
    import pandas as pd

    found: dict[tuple[str, str], list[tuple[str, dict[str, float]]]] = {}
    for label, folder in finished:
        metric, unit, means = _final_means(folder)
        if means:
            found.setdefault((metric, unit), []).append((label, means))
    tables = []
    for (metric, unit), jobs in found.items():
        labels, rows = zip(*jobs, strict=True)
        runs = pd.DataFrame(rows, index=labels)
        kinds = [kind for kind in KINDS if kind in runs]
        tables.append(Scores(f"{metric} in %" if unit else metric, unit, runs[kinds]))
    return tables
