"""Signals that ask a run to end: it drops the work at hand, saves the last complete round, and says so.

SIGTERM and SIGUSR1 are what schedulers such as SLURM send before they take a machine away; SIGINT is Ctrl-C. A
second one ends the process at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, ParamSpec, Self

from fedspa.runs.streams import ReaderGone

Parameters = ParamSpec("Parameters")

PREEMPTED = 75
"""Exit code (EX_TEMPFAIL of sysexits.h) of a run that was preempted: the same command with resume=auto goes on."""
STOPPED = 130
"""Exit code after Ctrl-C, as shells have it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))


class Preempted(KeyboardInterrupt):
    """The machine is to be given up: SIGTERM or SIGUSR1."""


class _Listener(ABC):
    """While it is entered, the signals come here; then they go again where they went before."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others get no signals
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @abstractmethod
    def _receive(self, number: int, frame: FrameType | None) -> None:
        """What a signal does."""


class Interruptions(_Listener):
    """While it is entered, the first signal waits for a moment at which the work may be dropped.

    That moment is inside `allowed`: there it is raised at once, as KeyboardInterrupt or `Preempted`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._signal: int | None = None
        self._allowed = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        for handler in self._before.values():
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, Preemptible):
                outer.heard |= self._signal is not None

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


class Preemptible(_Listener):
    """While it is entered, nothing has to be saved: the first signal is raised at once, as `Interruptions` does."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = False
        """Whether there was a signal; the next one ends the process."""

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.heard:
            end_at_once(number)
        self.heard = True
        raise interruption(number)


def ends_when_interrupted(main: Callable[Parameters, int]) -> Callable[Parameters, int]:
    """Make `main`, which returns an exit code and saves nothing, end with a word and the code of a signal."""

    @wraps(main)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> int:
        try:
            with Preemptible():
                return main(*args, **kwargs)
        except ReaderGone:
            raise
        except KeyboardInterrupt as stop:
            print("Stopped.", file=sys.stderr)
            return PREEMPTED if isinstance(stop, Preempted) else STOPPED

    return guarded


def end_at_once(number: int) -> None:
    """Die of a signal, as a program without handlers does."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the first process of a container does not die of its own signals
