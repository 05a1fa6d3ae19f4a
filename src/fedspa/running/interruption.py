"""Signals that ask a run to end: it drops the work at hand, saves the last complete round, and says so.

SIGTERM and SIGUSR1 are what schedulers such as SLURM send before they take a machine away; SIGINT is Ctrl-C. A
second one ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

PREEMPTED = 75
"""Exit code (EX_TEMPFAIL of sysexits.h) of a run that was preempted: the same command with resume=auto goes on."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))


class Preempted(KeyboardInterrupt):
    """The machine is to be given up: SIGTERM or SIGUSR1."""


class Interruptions:
    """While it is entered, the first signal waits for a moment at which the work may be dropped.

    That moment is inside `allowed`: there it is raised at once, as KeyboardInterrupt or `Preempted`.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._allowed = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruptions:
        if threading.current_thread() is threading.main_thread():  # others get no signals
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Work that may be dropped at any point."""
        self._allowed = True
        try:
            if self._signal is not None:
                raise interruption(self._signal)
            yield
        finally:
            self._allowed = False

    @property
    def pending(self) -> KeyboardInterrupt | None:
        """What a signal that came so far is raised as."""
        return None if self._signal is None else interruption(self._signal)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            end_at_once(number)
        self._signal = number
        if self._allowed:
            raise interruption(number)


def interruption(number: int) -> KeyboardInterrupt:
    """What a signal is raised as."""
    if number == signal.SIGINT:
        return KeyboardInterrupt("interrupted")
    return Preempted(f"preempted by {signal.Signals(number).name}")


@contextmanager
def preemptible() -> Iterator[None]:
    """Where nothing has to be saved: SIGTERM and SIGUSR1 are raised at once, as Ctrl-C is."""

    def receive(number: int, frame: FrameType | None) -> None:
        raise interruption(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, receive) for number in SIGNALS if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_at_once(number: int) -> None:
    """Die of a signal, as a program without handlers does."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the first process of a container does not die of its own signals
