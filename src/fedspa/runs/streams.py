"""Standard output and error: streams that may be closed, that may lack a sign, or whose reader may go away."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import wraps
from typing import Any, ParamSpec, TextIO, cast

READER_GONE = 141
"""The exit code that a shell shows for a program which the signal SIGPIPE ended: 128 + 13."""
SPELT = "fedspa-spelt"
"""The name under which `codecs` knows how we write a sign that a stream's encoding lacks."""

Parameters = ParamSpec("Parameters")


class ReaderGone(KeyboardInterrupt):
    """Nobody reads standard output any more: whatever runs is stopped, as by Ctrl-C."""


def ends_with_its_reader(main: Callable[Parameters, int]) -> Callable[Parameters, int]:
    """Make `main`, which returns an exit code, end without a word and with `READER_GONE` when its reader goes."""

    @wraps(main)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> int:
        take_any_streams()
        with redirect_stdout(cast(TextIO, _Output(sys.stdout))):
            try:
                code = main(*args, **kwargs)
                sys.stdout.flush()
            except ReaderGone:
                return READER_GONE
        return code

    return guarded


def take_any_streams() -> None:
    """Open a standard stream that was closed (`>&-`) on nothing, and have the others write any sign.

    A closed stream also leaves its number free: the next file that is opened would get what others write to it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)  # gets the lowest free number
    codecs.register_error(SPELT, _spelt)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (as long as the program)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=SPELT)


def _spelt(error: UnicodeError) -> tuple[str, int]:
    """Write +- for ±, and the number of any other sign."""
    assert isinstance(error, UnicodeEncodeError)
    signs = error.object[error.start : error.end].replace("±", "+-")
    return signs.encode("ascii", "backslashreplace").decode("ascii"), error.end


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
