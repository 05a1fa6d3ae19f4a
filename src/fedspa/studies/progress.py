"""The position in a study, and the table over its jobs at the end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedspa.core import names
from fedspa.core.records import KINDS
from fedspa.costs.units import show_time

WATCH_SECONDS = 0.5


class Progress:
    """Counts the jobs of a study, and estimates the time left from the jobs that ran here."""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.done, self._skipped = jobs, 0, 0
        self._begin = time.monotonic()

    def skip(self, jobs: int) -> None:
        """Count jobs that need not run."""
        self.done += jobs
        self._skipped += jobs

    @property
    def left(self) -> str:
        """The time left, as ", about 4.0 min left"; "" before any job has run."""
        ran = self.done - self._skipped
        if not ran or self.done >= self.jobs:
            return ""
        seconds = (time.monotonic() - self._begin) / ran * (self.jobs - self.done)
        return f", about {show_time(seconds)} left"

    def begin(self, name: str) -> None:
        """Print which job begins, of jobs that run one after another."""
        print(f"\njob {self.done + 1} of {self.jobs}{self.left}: {name}", flush=True)

    @contextmanager
    def watching(self, finished: Callable[[], dict[str, str]]) -> Iterator[None]:
        """Print each job as soon as it is finished, of jobs that run side by side.

        `finished`: the finished jobs by name, each with a few words on its result.
        """
        over, seen = threading.Event(), set(finished())

        def look() -> None:
            for name, words in finished().items():
                if name not in seen:
                    seen.add(name)
                    self.done += 1
                    print(f"{self.done} of {self.jobs} jobs done{self.left}: {name}  {words}", flush=True)

        def watch() -> None:
            while not over.wait(WATCH_SECONDS):
                look()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            look()


def _means(folder: Path) -> tuple[str, str, dict[str, float]]:
    """The main metric of a finished run, its unit, and the final mean of each kind of model."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    metric = names.main_metric(summary)
    found = {kind: summary.get(names.final(names.score(metric, kind))) for kind in KINDS}
    return metric, names.unit(summary), {kind: mean for kind, mean in found.items() if mean is not None}


def outcome(folder: Path) -> str:
    """A finished run in a few words."""
    _, unit, found = _means(folder)
    words = [f"{kind} {names.shown(mean, unit, 1)}{unit}" for kind, mean in found.items()]
    return ", ".join(words) or "finished"


def table(finished: Iterable[tuple[str, Path]]) -> str:
    """The main scores of finished jobs, a table for each metric, with a column for each kind of model.

    Args:
        finished: the label and folder of each job. The scores of jobs with the same label are averaged.
    """
    import pandas as pd

    by_metric: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for label, folder in finished:
        metric, unit, found = _means(folder)
        if found:
            by_metric.setdefault((metric, unit), []).append({"label": label, "runs": folder.name, **found})
    tables = []
    for (metric, unit), rows in by_metric.items():
        frame = pd.DataFrame(rows).groupby("label", sort=False)
        kinds = [kind for kind in KINDS if any(kind in row for row in rows)]
        means = pd.concat([frame["runs"].count(), frame[kinds].mean()], axis=1)
        means = means.rename_axis(index=None, columns=f"{metric} in %" if unit else metric)
        shown = {kind: lambda mean, unit=unit: names.shown(mean, unit) for kind in kinds}
        tables.append(means.to_string(formatters=shown, na_rep="-", max_colwidth=None))
    return "\n\n".join(tables)
