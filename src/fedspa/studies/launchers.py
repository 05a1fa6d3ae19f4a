"""Jobs of a sweep side by side: what fedspa adds to Hydra's launchers.

Hydra's own launcher runs jobs one after another in this process. Those of its plug-ins run them in other processes,
here (joblib, submitit's local executor) or elsewhere (SLURM, Ray). There a job gets its share of the cores, its console
goes to a file of its folder, and a signal ends it with its last round saved.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fedspa.core.launch import usable_cores
from fedspa.runs.interruption import PREEMPTED, SIGNALS, Preempted, end_at_once, interruption
from fedspa.runs.streams import SPELT, take_any_streams

CONSOLE = "console.txt"
"""In a job's folder: what it would have said on the screen."""
EXTRAS = {"joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit", "ray": "ray"}
"""The extra of fedspa that brings a launcher."""
WATCH_SECONDS = 0.5


@dataclass(frozen=True)
class Launching:
    """How the sweep's launcher runs jobs."""

    side_by_side: bool = False
    """In processes of their own."""
    here: bool = False
    """These are children of this one."""
    at_once: int | None = None
    """The launcher is given so many jobs at a time; None: all."""
    cores: int | None = None
    """For each job; None: it finds out itself."""

    @classmethod
    def by(cls, launcher: Mapping[str, Any], jobs: int) -> Launching:
        """That of Hydra's config `hydra.launcher`, for so many jobs."""
        kind, mine = str(launcher["_target_"]).rpartition(".")[2], usable_cores()
        if kind == "BasicLauncher":
            return cls()
        if kind == "JoblibLauncher":
            asked = launcher.get("n_jobs")
            together = 1 if asked is None else asked if asked > 0 else max(mine + 1 + asked, 1)
            return cls(True, True, None, max(mine // min(together, jobs), 1))
        if kind == "LocalLauncher":  # starts all that it is given at once
            together = min(mine, jobs)
            return cls(True, True, together, mine // together)
        if kind == "SlurmLauncher":
            return cls(True, cores=launcher.get("cpus_per_task"))
        if kind == "RayLauncher":
            asked = launcher["ray"]["remote"].get("num_cpus")
            return cls(True, cores=max(int(asked or 1), 1))
        return cls(True)

    def run(self, launch: Callable[[Sequence[Any], int], Sequence[Any]], jobs: Sequence[Any]) -> list[Any]:
        """What `launch(jobs, number of the first)` returns for all jobs; raises KeyboardInterrupt after a signal."""
        if not self.side_by_side:
            return list(launch(jobs, 0))
        _run_this_code()
        if not self.here:
            return list(launch(jobs, 0))
        returned: list[Any] = []
        # submitit has a process watch over each job, which passes a signal on, and kills a second after Ctrl-C.
        with _told_to_end() as told, _kept_from_children() if self.at_once else nullcontext():
            for first in range(0, len(jobs), self.at_once or len(jobs)):
                if not told:
                    returned += launch(jobs[first : first + (self.at_once or len(jobs))], first)
        return returned


def _run_this_code() -> None:
    """Processes to come import this very package, wherever another copy of it may be installed."""
    source = str(Path(__file__).resolve().parents[2])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if source not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([source, *filter(None, paths)])


@contextmanager
def _told_to_end() -> Iterator[list[int]]:
    """A signal is noted, and told to the jobs; it is raised once they have saved their last rounds and ended.

    Ctrl-C reaches the jobs by itself. A second signal ends everything at once.
    """
    told: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if told:
            end_at_once(number)
        told.append(number)
        if number != signal.SIGINT:
            for process in _descendants(os.getpid()):
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(process, number)

    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    before = {number: signal.signal(number, receive) for number in SIGNALS}
    try:
        yield told
    except Exception:
        if not told:  # else a job's process was hit before it could take care
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if told:
        raise interruption(told[0])


@contextmanager
def _kept_from_children() -> Iterator[None]:
    """Processes begin with the signals blocked, until `beside_others` lets them through to a job.

    So a job gets each signal once: from the terminal, or from here. To this process they come by a thread of its own.
    """
    over = threading.Event()
    threading.Thread(target=over.wait, name="signals", daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()


def _descendants(process: int) -> list[int]:
    """The processes below this one, as Linux tells; none elsewhere."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, new = [], [process]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found += new
    return found


_ended: list[int] = []
"""In a job's process: the signal after which it begins no further job."""


class Ended(Exception):
    """A job was ended by a signal. Unlike KeyboardInterrupt it does not end the process, which has to say so."""

    def __init__(self, code: int) -> None:
        super().__init__("Preempted." if code == PREEMPTED else "Stopped.")
        self.code = code


@contextmanager
def beside_others(folder: Path) -> Iterator[None]:
    """A job in a process of its own. Raises `Ended` where a signal ends it, or has ended one before it."""

    def receive(number: int, frame: FrameType | None) -> None:
        _ended.append(number)
        if working:
            raise interruption(number)

    def end() -> Ended:
        return Ended(PREEMPTED if isinstance(interruption(_ended[0]), Preempted) else 130)

    working = True
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:  # also for the time between two jobs, in which nothing has to end
            signal.signal(number, receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if _ended:
        raise end()
    console = folder / CONSOLE
    take_any_streams()  # this process may lack what the sweep's own has
    try:
        with console.open("a", encoding="utf-8", errors=SPELT) as file, redirect_stdout(file):
            yield
    except KeyboardInterrupt as stop:
        if not _ended:  # the run itself took the signal
            _ended.append(signal.SIGTERM if isinstance(stop, Preempted) else signal.SIGINT)
        raise end() from None
    finally:
        working = False
        for handler in list(
            logging.getLogger().handlers
        ):  # the launcher's own lines do not belong to the job
            if isinstance(handler, logging.FileHandler):
                logging.getLogger().removeHandler(handler)
                handler.close()
        if console.exists() and not console.stat().st_size:
            console.unlink()


@contextmanager
def watched(finished: Callable[[], Mapping[str, str]], jobs: int) -> Iterator[None]:
    """Says of each job at once that it has finished, as the files in its folder tell.

    `finished`: the finished jobs by name, each with a few words on it.
    """
    over, told = threading.Event(), set(finished())

    def look() -> None:
        for name, words in finished().items():
            if name not in told:
                told.add(name)
                print(f"{len(told)} of {jobs} done: {name}  {words}", file=sys.stdout, flush=True)

    def watch() -> None:
        while not over.wait(WATCH_SECONDS):
            look()

    thread = threading.Thread(target=watch, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()
