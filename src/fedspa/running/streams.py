"""Standard output whose reader may go away, as `head` does when it has seen enough."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import wraps
from typing import Any, ParamSpec, TextIO, cast

READER_GONE = 141
"""The exit code that a shell shows for a program which the signal SIGPIPE ended: 128 + 13."""

Parameters = ParamSpec("Parameters")


class ReaderGone(KeyboardInterrupt):
    """Nobody reads standard output any more: whatever runs is stopped, as by Ctrl-C."""


def ends_with_its_reader(main: Callable[Parameters, int]) -> Callable[Parameters, int]:
    """Make `main`, which returns an exit code, end without a word and with `READER_GONE` when its reader goes."""

    @wraps(main)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> int:
        with redirect_stdout(cast(TextIO, _Output(sys.stdout))):
            try:
                code = main(*args, **kwargs)
                sys.stdout.flush()
            except ReaderGone:
                return READER_GONE
        return code

    return guarded


class _Output:
    """A text stream that raises `ReaderGone` once, and takes what is written after that to nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._watched():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._watched():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            with suppress(OSError):  # a stream without a file
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            raise ReaderGone from None
