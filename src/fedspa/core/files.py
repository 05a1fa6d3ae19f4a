"""Writes files that are either complete or not there, even if the process is killed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".part"
"""The ending of a file's name while it is written. A process that is killed leaves such a file behind."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to under a temporary name. At the end it is flushed to the disk and renamed.

    An earlier file stays unchanged until then. Raises `OSError` if the file cannot be written; the temporary file is
    removed then.
    """
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # some file systems report only now that they are full
        os.replace(unfinished, path)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:  # the system's error for a full disk names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_whole(path: Path, content: bytes | str | Iterable[bytes | memoryview]) -> None:
    """Write a file with `whole_file`.

    `content`: all of it, or its pieces, if it is too large for the memory.
    """
    text = content.encode() if isinstance(content, str) else content
    pieces = [text] if isinstance(text, bytes) else text
    with whole_file(path) as file:
        for piece in pieces:
            file.write(piece)
