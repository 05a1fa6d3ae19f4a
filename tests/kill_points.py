"""Points in the life of a run at which it can be killed: forks of the test process count them, and die at one."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from fedspa.checkpoints import checkpoint
from fedspa.checkpoints.checkpoint import Checkpoints
from fedspa.config.plan import Plan
from fedspa.federated.aggregation import Aggregator
from fedspa.federated.client_runner import ClientRunner
from fedspa.runs.experiment import run
from fedspa.runs.interruption import Preempted
from fedspa.tracking import run_folder, tables
from fedspa.tracking.run_folder import RunFolder
from fedspa.training.eager import EagerEngine

POINTS: dict[str, tuple[Any, str]] = {
    "training": (EagerEngine, "_step"),
    "testing": (ClientRunner, "_predict"),
    "aggregation": (Aggregator, "add"),
    "merge": (Aggregator, "result"),
    "table": (tables.Table, "write"),
    "sync": (RunFolder, "sync"),
    "fsync": (os, "fsync"),
    "rename": (os, "replace"),
    "prune": (Path, "unlink"),
    "finetuning": (ClientRunner, "_finetune"),
    "results": (run_folder, "save_tensors"),
    "end": (Checkpoints, "finish"),
}
"""By name: what is killed before it does anything. `bytes` is one more: in the middle of writing a checkpoint."""

Act = Callable[[], None]


def die() -> None:
    """As the kernel or the power company would have it."""
    os.kill(os.getpid(), signal.SIGKILL)


class Torn:
    """A file that gets only half of a write when its process dies."""

    def __init__(self, file: Any, passes: Callable[[str], bool], act: Act) -> None:
        self._file, self._passes, self._act = file, passes, act

    def write(self, part: bytes) -> None:
        if self._passes("bytes"):
            self._file.write(part[: len(part) // 2])
            self._file.flush()
            self._act()
        self._file.write(part)


@contextmanager
def instrumented(passes: Callable[[str], bool], act: Act) -> Iterator[None]:
    """`passes(name)` is asked at every point; where it says so, `act` is called there."""

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if passes(name):
                act()
            return original(*args, **kwargs)

        return call

    original = checkpoint.write
    patches = [
        mock.patch.object(owner, name, watched(point, getattr(owner, name)))
        for point, (owner, name) in POINTS.items()
    ]
    patches.append(
        mock.patch.object(checkpoint, "write", lambda tree, file: original(tree, Torn(file, passes, act)))
    )
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def count(plan: Plan, folder: Path) -> Counter[str]:
    """How often each point comes in a whole run, which is made here and now."""
    seen: Counter[str] = Counter()

    def passes(name: str) -> bool:
        seen[name] += 1
        return False

    with instrumented(passes, die):
        run(plan, folder)
    return seen


def run_until(plan: Plan, folder: Path, point: str, number: int, act: Act = die) -> int:
    """Run in a fork until a point comes for the n-th time (from 1), and do `act` there.

    Returns the exit status as `Popen.returncode` has it: below 0, the signal that killed the fork. A fork that goes
    on to the end exits with 0; one that raises, with 75 or 130 for an interruption, else with 1.
    """
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            silence()
            left = {point: number}

            def passes(name: str) -> bool:
                left[name] = left.get(name, 0) - 1
                return left[name] == 0

            try:
                with instrumented(passes, act):
                    run(plan, folder)
                code = 0
            except Preempted:
                code = 75
            except KeyboardInterrupt:
                code = 130
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def silence() -> None:
    """Of a fork, which shares the terminal."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
