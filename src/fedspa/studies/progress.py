"""How far a sweep is, and the table over its jobs at the end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from fedspa.core import names
from fedspa.core.records import KINDS
from fedspa.costs.units import show_time

WATCH_SECONDS = 0.5


class Progress:
    """Counts the jobs of a sweep, and tells how long the rest takes at the pace so far."""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.done = jobs, 0
        self._begin = time.monotonic()

    @property
    def left(self) -> str:
        """ ", about 4.0 min left", or nothing while no job is done."""
        if not 0 < self.done < self.jobs:
            return ""
        seconds = (time.monotonic() - self._begin) / self.done * (self.jobs - self.done)
        return f", about {show_time(seconds)} left"

    def begin(self, name: str) -> None:
        """Say which job begins, of jobs that run one after another."""
        print(f"\njob {self.done + 1} of {self.jobs}{self.left}: {name}", flush=True)

    @contextmanager
    def watching(self, finished: Callable[[], dict[str, str]]) -> Iterator[None]:
        """Say of each job at once that it is done, of jobs that run side by side.

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


def means(folder: Path) -> tuple[str, str, dict[str, float]]:
    """The main metric of a finished run, its unit, and the final mean of each kind of model."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    metric = names.main_metric(summary)
    found = {kind: summary.get(names.final(names.score(metric, kind))) for kind in KINDS}
    return metric, names.unit(summary), {kind: mean for kind, mean in found.items() if mean is not None}


def outcome(folder: Path) -> str:
    """A finished run in a few words."""
    _, unit, found = means(folder)
    words = [f"{kind} {names.shown(mean, unit, 1)}{unit}" for kind, mean in found.items()]
    return ", ".join(words) or "finished"


def table(folders: Sequence[Path]) -> str:
    """The main scores of finished jobs: a line for jobs that differ in nothing but their seed, a column for each kind.

    A job's folder has the name of its settings: method=fedspa,seed=0.
    """
    rows: dict[str, list[dict[str, float]]] = {}
    for folder in folders:
        settings = [part for part in folder.name.split(",") if not part.startswith("seed=")]
        rows.setdefault(",".join(settings) or "all", []).append(means(folder)[2])
    kinds = [kind for kind in KINDS if any(kind in run for runs in rows.values() for run in runs)]
    if not kinds:
        return ""
    metric, unit, _ = means(folders[0])
    head = f"{metric} in %" if unit else metric
    width = max(map(len, [*rows, head]))
    lines = [f"{head:<{width}}{'runs':>6}" + "".join(f"{kind:>11}" for kind in kinds)]
    for name, runs in rows.items():
        cells = [[run[kind] for run in runs if kind in run] for kind in kinds]
        shown = "".join(f"{names.shown(fmean(cell), unit):>11}" if cell else f"{'-':>11}" for cell in cells)
        lines.append(f"{name:<{width}}{len(runs):>6}{shown}")
    return "\n".join(lines)
