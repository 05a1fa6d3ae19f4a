"""Wall-clock seconds by phase of a round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fedspa.core.records import PHASES


class Clock:
    """Adds up the seconds spent in each phase: `with clock("train"): ...`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - begin

    def add(self, seconds: dict[str, float]) -> None:
        """Add the seconds of another clock, perhaps from another process."""
        for phase, value in seconds.items():
            self.seconds[phase] += value
