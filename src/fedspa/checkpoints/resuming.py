"""Where a run goes on: the folder of one that was broken off, and a lock against two runs in one folder.

Light on purpose (no torch): that a run is finished already is answered at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedspa.checkpoints.data_there import DataThere
from fedspa.config.plan import Plan
from fedspa.core.errors import UserError, brief
from fedspa.core.identity import CONFIG_HASH, what_differs
from fedspa.core.paths import project_root

AUTO = "auto"
CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, in its own."""
_LOCK = ".lock"
_PATIENCE = 2.0
"""Seconds: the worker processes of a run that was just killed may hold its lock for a moment."""


class Place(NamedTuple):
    """Where a run is to go on, or to begin."""

    folder: Path
    finished: bool = False
    """Nothing is left to do there."""


def place(plan: Plan, folder: Path, *, given: bool) -> Place:
    """The folder that `resume` means; `folder` itself where there is nothing to go on with, or resume=null.

    Args:
        plan: of this run.
        folder: where the run would begin anew.
        given: whether the user (or a sweep) chose that folder, so that resume=auto looks nowhere else.

    Raises `UserError` where the folder holds a run with other settings, or a finished one on other data.
    """
    resume = plan.settings.resume
    if resume is None:
        return Place(folder)
    if resume == AUTO:
        found = folder if given else _newest(plan) or folder
        if config_hash_in(found) is None:
            return Place(folder)
    else:
        found = Path(resume)
        if config_hash_in(found) is None:
            raise UserError(
                f"resume={resume} holds no run: name the folder of one (it has a config.yaml), or auto."
            )
    refuse_other_settings(_config_in(found), plan.resolved, str(found))
    finished = is_finished(found, plan.config_hash)
    if finished and not DataThere().same(found, plan):
        raise UserError(
            f"{found} holds a finished run on other images or labels than dataset={plan.names['dataset']} has now: "
            "begin a new run in another folder."
        )
    return Place(found, finished)


def refuse_other_settings(theirs: object, ours: dict[str, Any], where: str) -> None:
    """Raise `UserError` unless runs with these resolved configs are the same run."""
    if differs := what_differs(theirs if isinstance(theirs, dict) else {}, ours):
        raise UserError(
            f"{where} holds a run with other settings: {', '.join(differs)}. Repeat its settings to go on with it, "
            "or begin a new run in another folder."
        )


def is_finished(folder: Path, config_hash: str) -> bool:
    """Whether a folder holds the finished run of just this config, on whatever data: see `DataThere`."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return False
    # A checkpoint that is left tells of a run that was killed while it handed its results to its trackers.
    same = isinstance(summary, dict) and summary.get("config_hash") == config_hash
    return same and not has_checkpoint(folder)


def leaves_otherwise(folder: Path, plan: Plan) -> bool:
    """Whether the run that began in a folder leaves something else there than this plan asks for, such as with
    `save.local`, though its results may be the same."""
    if config_hash_in(folder) is None:
        return False
    config = _config_in(folder)
    return bool(what_differs(config if isinstance(config, dict) else {}, plan.resolved))


def has_checkpoint(folder: Path) -> bool:
    """Whether a run can go on in this folder, as far as the names of files tell."""
    return any((folder / CHECKPOINTS).glob("round-*.ckpt"))


def config_hash_in(folder: Path) -> str | None:
    """The config hash of the run that began in a folder, finished or not; None where none did."""
    try:
        with (folder / "config.yaml").open(encoding="utf-8") as file:
            line = file.readline().rstrip("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return line.removeprefix(CONFIG_HASH) if line.startswith(CONFIG_HASH) else None


def _config_in(folder: Path) -> object:
    """The resolved config of the run that began in a folder; YAML is read without what could make objects."""
    file = folder / "config.yaml"
    try:
        return OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(
            f"{file} cannot be read ({brief(error)}): put it back as it was, or begin a new run in another folder."
        ) from error


def _newest(plan: Plan) -> Path | None:
    """The newest run under outputs/, where runs go unless told otherwise, that is this plan's and can go on.

    Passed over: runs that would be refused by what they gather, and finished ones on other data.
    """
    there = DataThere()
    begun = {path.parent: path.stat().st_mtime_ns for path in project_root().glob("outputs/*/*/config.yaml")}
    for folder in sorted(begun, key=lambda folder: (begun[folder], folder), reverse=True):
        if config_hash_in(folder) != plan.config_hash or leaves_otherwise(folder, plan):
            continue
        if not is_finished(folder, plan.config_hash) or there.same(folder, plan):
            return folder
    return None


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Keep every other run out of a folder. Raises `UserError` where one is in there."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK, timeout=_PATIENCE)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"A run is going on in {folder} already: wait for its end, or give another hydra.run.dir."
        ) from error
    try:
        yield
    finally:
        lock.release()
        if [path.name for path in folder.iterdir()] == [_LOCK]:  # nothing came of the run
            with suppress(OSError):
                (folder / _LOCK).unlink()
