"""The position in a study, and the time left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
