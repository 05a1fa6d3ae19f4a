"""Whether the images of a finished run are those that its config finds today.

The config hash knows no data, since data may be moved. So a run leaves the hash of its images and labels, and what the
file system said of the files behind `dataset.path`. As long as that is the same nothing is read; else the data is.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from fedspa.config.plan import Plan
from fedspa.core.errors import UserError, brief


def file_marks(path: str | None) -> str:
    """16 hex digits of place, size and times of change of every file at or below `path`; "" without a path.

    Raises `UserError` where they cannot be had.
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
    """Looks at each data set once, however many runs are asked about."""

    def __init__(self) -> None:
        self._marks: dict[str | None, str] = {}
        self._hashes: dict[str, str] = {}

    def same(self, folder: Path, plan: Plan) -> bool:
        """Whether the finished run in `folder` had the images and labels that `plan` would have.

        Raises `UserError` where they cannot be read, as far as they must be.
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
