"""A file of the first rank, for all ranks: they may be on machines that share no disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import torch

from fedspa.runs.rank_group import RankGroup

PIECE = 1 << 24
"""Bytes that travel together."""


@contextmanager
def on_every_rank(path: Path | None, group: RankGroup) -> Iterator[BinaryIO | None]:
    """The file, open for reading; None where there is none. `path` is that of the first rank.

    The others have a copy in the folder for temporary files (TMPDIR), which nobody else sees.
    """
    file: BinaryIO | None = None
    try:
        with group.synchronised():
            if not group.main:
                file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 (closed below)
            elif path:
                file = path.open("rb")
        size = group.broadcast(os.fstat(file.fileno()).st_size if group.main and file else None)
        if size is None or file is None:
            yield None
            return
        if group.size > 1:
            with group.synchronised():
                for piece in group.announced(_pieces(file, size, group)):
                    if not group.main:
                        file.write(piece.numpy().data)
        yield file
    finally:
        if file:
            file.close()


def _pieces(file: BinaryIO, size: int, group: RankGroup) -> Iterator[torch.Tensor]:
    for begin in range(0, size, PIECE):
        piece = torch.empty(min(PIECE, size - begin), dtype=torch.uint8)
        if group.main:
            file.readinto(piece.numpy().data)  # type: ignore[attr-defined]
        group.broadcast_tensor(piece, source=0)
        yield piece
