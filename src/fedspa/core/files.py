"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".part"
"""How the name of a file ends while it is written; a process that is killed leaves it so."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, under another name; in the end it is brought to the disk and gets its own.

    What was there before stays until then, whatever happens. Raises `OSError` where the file cannot be written;
    nothing of the attempt is left then.
    """
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # some file systems tell only now that they are full
        os.replace(unfinished, path)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:  # for a full disk the operating system names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_whole(path: Path, content: bytes | str | Iterable[bytes | memoryview]) -> None:
    """Write a file by `whole_file`.

    `content`: all of it, or its pieces, for what is not to be in memory all at once.
    """
    text = content.encode() if isinstance(content, str) else content
    pieces = [text] if isinstance(text, bytes) else text
    with whole_file(path) as file:
        for piece in pieces:
            file.write(piece)
