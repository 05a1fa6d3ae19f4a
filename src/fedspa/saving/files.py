"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: bytes | str | Iterable[bytes | memoryview]) -> None:
    """Write a file under another name, then give it its own: a full disk or a crash leaves what was there before.

    `content`: all of it, or its pieces, for what is not to be in memory all at once.
    Raises `OSError` where it cannot be written; nothing of the attempt is left then.
    """
    text = content.encode() if isinstance(content, str) else content
    pieces = [text] if isinstance(text, bytes) else text
    unfinished = path.with_name(f".{path.name}.part")
    try:
        with unfinished.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())  # some file systems tell only now that they are full
        os.replace(unfinished, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename, error.filename2 = (
                str(path),
                None,
            )  # the operating system names none for a full disk
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
