"""Archives as bytes."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

from fedspa.checkpoints.archive import read, write


def pack(tree: Any) -> bytes:
    """The bytes of a tree."""
    file = io.BytesIO()
    write(tree, file)
    return file.getvalue()


def unpack(data: bytes) -> Any:
    """The tree in these bytes. Raises `ArchiveError`."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return read(Path(file.name))
