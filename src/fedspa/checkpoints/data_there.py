"""Checks that a finished run had the same images as its config finds today.

The config hash does not contain the data's path, since data may be moved. So a run records the hash of its images and
labels, and facts about the files behind `dataset.path`. While these facts are the same, the data need not be read.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from fedspa.config.plan import Plan
from fedspa.core.errors import UserError, brief


def file_marks(path: str | None) -> str:
    """A hash of place, size and times of change of all files at or below `path`: 16 hex digits, or "" without a path.

    Raises `UserError` if the files cannot be read.
    """
    if path is None:
        return ""
    root, digest, seen = Path(path).expanduser().resolve(), hashlib.sha256(), set()
    try:
        found = [root] if root.is_file() else []
        for folder, folders, names in os.walk(root, followlinks=True):
            if (real := os.path.realpath(folder)) in seen:  # links that go round in a circle
                folders.clear()
                continue
            seen.add(real)
            folders.sort()
            found += [Path(folder, name) for name in sorted(names)]
        for file in filter(Path.exists, found):
            facts = file.stat()
            digest.update(f"{file}\0{facts.st_size}\0{facts.st_mtime_ns}\0{facts.st_ctime_ns}\0".encode())
    except OSError as error:
        raise UserError(f"dataset.path={path} cannot be read ({brief(error)}).") from error
    return digest.hexdigest()[:16]


class DataThere:
    """Checks each data set once, for any number of runs."""

    def __init__(self) -> None:
        self._marks: dict[str | None, str] = {}
        self._hashes: dict[str, str] = {}

    def same(self, folder: Path, plan: Plan) -> bool:
        """True if the finished run in `folder` had the same images and labels as `plan` has now.

        Raises `UserError` if they must be read and cannot be.
        """
        summary = json.loads((folder / "summary.json").read_text())
        path = plan.resolved["dataset"].get("path")
        if path not in self._marks:
            self._marks[path] = file_marks(path)
        if summary.get("data_files", "") == self._marks[path]:
            return True
        which = json.dumps(plan.resolved["dataset"], sort_keys=True)
        if which not in self._hashes:
            self._hashes[which] = plan.dataset.load().hash
        return bool(summary.get("data_hash") == self._hashes[which])
