"""The checkpoints of a run: files of which a kill at any moment leaves at least one whole.

A checkpoint is written beside the others, brought to the disk, and only then given its name; the one before stays.
Its content is an `archive`, whose checksum is looked at whenever one is read.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedspa.checkpoints.archive import ArchiveError, data_size, verify, write
from fedspa.core.files import UNFINISHED, whole_file

log = logging.getLogger(__name__)

SHARE = 0.02
"""Of a run's time, what writing checkpoints may take where nobody says how often."""
BEST = "best.ckpt"
_NAME = re.compile(r"round-(\d+)\.ckpt")


class Checkpoints:
    """The files round-<completed rounds>.ckpt in one folder, and best.ckpt beside them."""

    def __init__(
        self, folder: Path, keep: int, every: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            folder: made at the first checkpoint.
            keep: how many of the newest stay; 0: none is written.
            every: rounds between two; None: as often as all of them together take `SHARE` of the time.
            clock: gives seconds.
        """
        self._folder, self._keep, self._every, self._clock = folder, keep, every, clock
        self._begin, self._spent = clock(), 0.0
        self._last_seconds, self._last_size = 0.0, 1

    def due(self, round: int, state: dict[str, Any]) -> bool:
        """Whether to write one after so many completed rounds."""
        if self._keep == 0:
            return False
        if self._every is not None:
            return round % self._every == 0
        allowed = SHARE * (self._clock() - self._begin) - self._spent
        if self._last_seconds > allowed:
            return False
        return self._last_seconds * max(1.0, data_size(state) / self._last_size) <= allowed

    def write(self, round: int, state: dict[str, Any], *, best: bool = False) -> None:
        """Write one, also as the best so far if it is; then remove what is older than the newest `keep`."""
        if self._keep == 0:
            return
        begin = self._clock()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"round-{round:06}.ckpt"
        self._remove_unfinished()
        with whole_file(path) as file:
            self._last_size = write(state, file)
        if best:
            self._make_best(path)
        _sync_folder(self._folder)
        files = self._files()
        newer = [
            file for file in files if _round_of(file) > round
        ]  # damaged, or the run had gone on from them
        for needless in (*newer, *files[len(newer) + self._keep :]):
            needless.unlink()
        self._last_seconds = self._clock() - begin
        self._spent += self._last_seconds

    def newest(self) -> Path | None:
        """The newest checkpoint that `archive.read` can read; None where there is none.

        Each newer one that cannot be read is told in a line.
        """
        for path in self._files():
            try:
                with path.open("rb") as file:
                    verify(file)
                return path
            except (ArchiveError, OSError) as error:
                log.warning("%s is left out (%s): the checkpoint before it is used.", path, error)
        return None

    def clear(self) -> None:
        """Remove all but the best: the run has ended well, and its results are in its folder."""
        self._remove_unfinished()
        for path in self._files():
            path.unlink()
        with suppress(OSError):
            self._folder.rmdir()  # unless the best is in there

    def _files(self) -> list[Path]:
        """The newest first."""
        return checkpoint_files(self._folder)

    def _remove_unfinished(self) -> None:
        """What a process that was killed has left."""
        for path in self._folder.glob(f".*{UNFINISHED}"):
            path.unlink()

    def _make_best(self, path: Path) -> None:
        """The same file under another name, or a copy where the file system has no links."""
        temporary = self._folder / f".{BEST}{UNFINISHED}"
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
        os.replace(temporary, self._folder / BEST)


def checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first; `best.ckpt` is none of them."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_round_of, reverse=True)


def _round_of(path: Path) -> int:
    """The completed rounds that a checkpoint's name tells."""
    return int(path.stem.removeprefix("round-"))


def _sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, where the system can do that."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
