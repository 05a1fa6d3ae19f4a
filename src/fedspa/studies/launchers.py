"""Jobs of a sweep side by side: Hydra's launchers start a process for each.

A job gets its share of the cores, its console goes to a file in its folder, and a signal ends it with its last round
saved.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from fedspa.core.launch import usable_cores
from fedspa.runs.interruption import PREEMPTED, SIGNALS, STOPPED, Interruptions, Preempted, interruption

CONSOLE = "console.txt"
"""The file in a job's folder with the output of the job."""
EXTRAS = {"joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit", "ray": "ray"}
"""The extra of fedspa that brings a launcher."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that limits the GPUs that CUDA sees, and ROCm too."""


class JobFailed(Exception):
    """A job of a sweep failed, and has said so. It holds plain values, since it may come from another process."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


def side_by_side(launcher: Mapping[str, Any]) -> bool:
    """True if a launcher, given as Hydra's config `hydra.launcher`, runs jobs in processes of their own."""
    return not str(launcher["_target_"]).endswith("BasicLauncher")


def cores_of_a_job(launcher: Mapping[str, Any], jobs: int) -> int | None:
    """The cores for each of so many jobs; None where a job may use all cores."""
    if "n_jobs" in launcher:  # joblib
        cores, asked = usable_cores(), launcher["n_jobs"] or 1
        together = asked if asked > 0 else max(cores + 1 + asked, 1)
        return max(cores // min(together, jobs), 1)
    if "ray" in launcher:
        return max(int(launcher["ray"]["remote"].get("num_cpus") or 1), 1)
    return launcher.get("cpus_per_task")


@contextmanager
def jobs_get_signals() -> Iterator[None]:
    """Pass a signal on to the jobs' processes; raise it here once they have saved their last rounds and ended.

    A terminal sends Ctrl-C to the jobs itself. A second signal ends this process at once.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        received.append(number)
        if number != signal.SIGINT:
            for process in multiprocessing.active_children():
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(process.pid or 0, number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, receive) for number in SIGNALS}
    try:
        yield
    except Exception:
        if not received:  # else a process was hit between two jobs
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise interruption(received[0])


_ended: list[JobFailed] = []
"""In a job's process: why it begins no further job."""


@contextmanager
def in_own_process(folder: Path) -> Iterator[None]:
    """A job in a process of its own. Raises `JobFailed` if a signal ends it, or has ended one before it."""
    if _ended:
        raise _ended[0]
    try:
        file = (folder / CONSOLE).open("a", encoding="utf-8", errors="replace")
        with file, redirect_stdout(file), Interruptions(anywhere=True):
            yield
    except KeyboardInterrupt as stop:  # it would end the process without a result
        preempted = isinstance(stop, Preempted)
        _ended.append(JobFailed(PREEMPTED, "Preempted.") if preempted else JobFailed(STOPPED, "Stopped."))
        raise _ended[0] from None


def take_a_gpu() -> None:
    """Have this process of joblib see one GPU of several, by its number. Left alone all would take the first.

    It keeps the GPU of its first job, since CUDA cannot change what it sees once it has begun.
    """
    number = re.search(r"\d+$", multiprocessing.current_process().name)  # LokyProcess-3
    if number and len(gpus := _visible()) > 1:
        os.environ[VISIBLE] = gpus[int(number[0]) % len(gpus)]


def _visible() -> list[str]:
    """The names of the GPUs that this process may use; asking does not begin CUDA."""
    if (given := os.environ.get(VISIBLE)) is not None:
        return [name.strip() for name in given.split(",")]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
