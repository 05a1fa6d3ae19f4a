"""Signals that ask a program to end, and the exit codes of commands.

Schedulers such as SLURM send SIGTERM or SIGUSR1 before they take a machine away; SIGINT is Ctrl-C. A run
drops its current round, saves the last complete one, and prints that. A second signal ends the process at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, Self

Parameters = ParamSpec("Parameters")

PREEMPTED = 75
"""The exit code of a preempted run (EX_TEMPFAIL of sysexits.h). The same command with resume=auto continues it."""
STOPPED = 130
"""The exit code after Ctrl-C, as in shells."""
READER_GONE = 141
"""The exit code of a program that SIGPIPE ended, as in shells: 128 + 13."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))


class Preempted(KeyboardInterrupt):
    """Raised when the machine is taken away: SIGTERM or SIGUSR1."""


def interruption(number: int) -> KeyboardInterrupt:
    """The exception for a signal number."""
    if number == signal.SIGINT:
        return KeyboardInterrupt("interrupted")
    return Preempted(f"preempted by {signal.Signals(number).name}")


class Interruptions:
    """A context in which the first signal is raised as soon as the work may be dropped.

    Work may be dropped inside `allowed`, or at any time if `anywhere`. A second signal ends the process.
    """

    def __init__(self, *, anywhere: bool = False) -> None:
        self._allowed, self._anywhere = anywhere, anywhere
        self._before: dict[int, Any] = {}
        self.pending: KeyboardInterrupt | None = None
        """The exception for a signal that has come."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others get no signals
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """A context for work that may be dropped at any point."""
        self._allowed = True
        try:
            if self.pending:
                raise self.pending
            yield
        finally:
            self._allowed = self._anywhere

    def _receive(self, number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self.pending = interruption(number)
        if self._allowed:
            raise self.pending


def command(main: Callable[Parameters, int]) -> Callable[Parameters, int]:
    """Make `main` a command: it returns an exit code also after a signal, or if its output is closed."""

    @wraps(main)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> int:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # an encoding may lack a sign such as ±
        try:
            with Interruptions(anywhere=True):
                code = main(*args, **kwargs)
            if sys.stdout:  # it may be closed from the start
                sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return READER_GONE
        except KeyboardInterrupt as stop:
            print("Stopped.", file=sys.stderr)
            return PREEMPTED if isinstance(stop, Preempted) else STOPPED
        return code

    return guarded
