"""The checkpoints of a run. After a kill at any moment at least one whole file is left.

A checkpoint is written under a temporary name, flushed to the disk, and then renamed; the one before stays.
Its content is an `archive`, whose checksum is checked at every reading.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedspa.checkpoints.archive import ArchiveError, verify, write
from fedspa.checkpoints.resuming import LAST
from fedspa.core.errors import UserError
from fedspa.core.files import UNFINISHED, whole_file

log = logging.getLogger(__name__)

SHARE = 0.02
"""The largest share of a run's time for writing checkpoints, if `checkpoint.every` is not set."""
BEST = "best.ckpt"
_NAME = re.compile(r"round-(\d+)\.ckpt")


class Checkpoints:
    """The files round-<completed rounds>.ckpt in one folder, and best.ckpt beside them."""

    def __init__(
        self, folder: Path, keep: int, every: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            folder: it is made at the first checkpoint.
            keep: the number of newest checkpoints that stay; 0: none is written.
            every: the rounds between two; None: as often as all of them together take `SHARE` of the time.
            clock: returns seconds.
        """
        self._folder, self._keep, self._every, self._clock = folder, keep, every, clock
        self._begin, self._spent = clock(), 0.0
        self._last_seconds = 0.0

    def due(self, round: int) -> bool:
        """True if a checkpoint should be written after so many completed rounds."""
        if self._keep == 0:
            return False
        if self._every is not None:
            return round % self._every == 0
        return self._spent + self._last_seconds <= SHARE * (self._clock() - self._begin)

    def write(self, round: int, state: dict[str, Any], *, best: bool = False) -> None:
        """Write a checkpoint, also as the best one if `best`. Then remove all but the newest `keep`."""
        if self._keep == 0:
            return
        begin = self._clock()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"round-{round:06}.ckpt"
        self._remove_unfinished()
        with whole_file(path) as file:
            write(state, file)
        if best:
            self._make_best(path)
        _sync_folder(self._folder)
        files = checkpoint_files(self._folder)
        newer = [
            file for file in files if _round_of(file) > round
        ]  # damaged, or the run had gone on from them
        for needless in (*newer, *files[len(newer) + self._keep :]):
            needless.unlink()
        self._last_seconds = self._clock() - begin
        self._spent += self._last_seconds

    def newest(self) -> Path | None:
        """The newest checkpoint that `archive.read` can read; None in a folder without checkpoints.

        The log names each newer checkpoint that cannot be read. Raises `UserError` if none of them can be read.
        """
        files = checkpoint_files(self._folder)
        for path in files:
            try:
                verify(path)
                return path
            except (ArchiveError, OSError) as error:
                log.warning("%s is left out (%s).", path, error)
        if files:
            raise UserError(
                f"No checkpoint in {self._folder} can be read, so the run cannot go on, and its files stay as they "
                f"are: put the checkpoints back, or move {self._folder.parent} away to begin the run again."
            )
        return None

    def finish(self) -> None:
        """Keep the best and the last checkpoint. The run has ended well, and can only be continued with more rounds."""
        if not (files := checkpoint_files(self._folder)):
            return
        self._remove_unfinished()
        for path in files[1:]:
            path.unlink()
        os.replace(files[0], self._folder / LAST)
        _sync_folder(self._folder)

    def _remove_unfinished(self) -> None:
        """Remove files that a killed process has left."""
        for path in self._folder.glob(f".*{UNFINISHED}"):
            path.unlink()

    def _make_best(self, path: Path) -> None:
        """Link the file under another name, or copy it if the file system has no links."""
        temporary = self._folder / f".{BEST}{UNFINISHED}"
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
        os.replace(temporary, self._folder / BEST)


def checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoints of single rounds in a folder, the newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_round_of, reverse=True)


def _round_of(path: Path) -> int:
    """The completed rounds in a checkpoint's name."""
    return int(path.stem.removeprefix("round-"))


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, if the system can do that."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
