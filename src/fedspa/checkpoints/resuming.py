"""Finds the folder in which a run resumes, and locks it against a second run.

This module does not import torch, so that a run that is already finished is reported at once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedspa.checkpoints.data_there import DataThere
from fedspa.config.plan import Plan
from fedspa.config.recorded import recorded_config, settings_today
from fedspa.core.errors import UserError
from fedspa.core.identity import CONFIG_HASH, ROUNDS, config_hash, following_rounds, what_differs
from fedspa.core.paths import project_root
from fedspa.core.roles import Role, settings_that

AUTO = "auto"
CHECKPOINTS, LAST = "checkpoints", "last.ckpt"
"""The folder of checkpoints in a run's folder, and the file that a finished run leaves there."""
_LOCK = ".lock"
_PATIENCE = 2.0
"""Seconds. The worker processes of a killed run may keep its lock for a moment."""


class Place(NamedTuple):
    """The folder in which a run resumes or begins."""

    folder: Path
    finished: bool = False
    """True if the run in the folder is finished."""


def place(plan: Plan, folder: Path, *, given: bool) -> Place:
    """The folder for `resume`; `folder` itself if there is nothing to resume, or with resume=null.

    Args:
        plan: the plan of this run.
        folder: the folder in which the run would begin anew.
        given: True if the user or a sweep chose that folder. resume=auto then checks no other folder.

    A finished run with fewer rounds than the plan is continued in a new folder.

    Raises `UserError` if the folder has a run with other settings, or a finished one on other data.
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
        if _has_other_rounds(found, plan):
            _check_continuing(found, plan)
            if config_hash_in(folder) is None:
                return Place(folder)
            found = folder  # the continuation was begun there already
    refuse_other_settings(_settings_in(found, plan), plan.resolved, str(found))
    finished = is_finished(found, plan)
    if finished and not DataThere().same(found, plan):
        raise UserError(
            f"{found} holds a finished run on other images or labels than dataset={plan.names['dataset']} has now: "
            "begin a new run in another folder."
        )
    return Place(found, finished)


def last_of_another(plan: Plan, folder: Path) -> Path | None:
    """The last checkpoint of the finished run that a run in `folder` continues."""
    resume = plan.settings.resume
    if resume in (None, AUTO) or Path(resume).resolve() == folder.resolve():
        return None
    return Path(resume, CHECKPOINTS, LAST)


def _has_other_rounds(folder: Path, plan: Plan) -> bool:
    """True if a folder has a finished run with another number of rounds."""
    summary = _summary_in(folder)
    return summary is not None and summary.get("rounds") != plan.settings.federation.rounds


def _check_continuing(found: Path, plan: Plan) -> None:
    """Raise `UserError` unless the finished run can be continued with the settings of the plan."""
    theirs, rounds = _settings_in(found, plan), plan.settings.federation.rounds
    refuse_other_settings(theirs, plan.resolved, str(found), following_rounds(theirs, plan.resolved))
    if rounds < (done := theirs[ROUNDS]):
        raise UserError(
            f"{ROUNDS}={rounds} is less than the {done} rounds of the finished run in {found}: ask for more rounds to "
            "continue it, or begin a new run in another folder."
        )
    if not Path(found, CHECKPOINTS, LAST).is_file():
        raise UserError(
            f"{found} cannot be continued, for it has no {CHECKPOINTS}/{LAST} (a run with checkpoint.keep=0 leaves "
            f"none): begin a new run of {rounds} rounds in another folder."
        )


def refuse_other_settings(
    theirs: dict[str, Any], ours: dict[str, Any], where: str, allowed: Collection[str] = ()
) -> None:
    """Raise `UserError` unless runs with these resolved configs are the same run, except for the `allowed` settings."""
    if differs := what_differs(theirs, ours, allowed):
        raise UserError(
            f"{where} holds a run with other settings: {', '.join(differs)}. Repeat its settings to go on with it, "
            "or begin a new run in another folder."
        )


def _settings_in(folder: Path, plan: Plan) -> dict[str, Any]:
    """The settings of the run in a folder, as a run of the plan has them."""
    return settings_today(recorded_config(folder / "config.yaml"), plan.settings.trusted_packages)


def is_finished(folder: Path, plan: Plan) -> bool:
    """True if a folder has the finished run of this plan, on any data: see `DataThere`."""
    summary = _summary_in(folder)
    if summary is None or summary.get("config_hash") == plan.config_hash:
        return summary is not None
    with suppress(UserError):  # a config that cannot be read is another one
        return config_hash(_settings_in(folder, plan)) == plan.config_hash
    return False


def _summary_in(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run; None without one."""
    if has_checkpoint(folder):  # the run was killed while its trackers wrote the results
        return None
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def leaves_otherwise(folder: Path, plan: Plan) -> bool:
    """True if the run in a folder leaves other files there than this plan, such as with `save.local`."""
    if config_hash_in(folder) is None:
        return False
    theirs, ours = (settings_that(each, Role.KEEPS) for each in (_settings_in(folder, plan), plan.resolved))
    return theirs != ours


def has_checkpoint(folder: Path) -> bool:
    """True if a run can resume in this folder, judged by the names of its files."""
    return any((folder / CHECKPOINTS).glob("round-*.ckpt"))


def config_hash_in(folder: Path) -> str | None:
    """The config hash of the run that began in a folder, finished or not; None without a run."""
    try:
        with (folder / "config.yaml").open(encoding="utf-8") as file:
            line = file.readline().rstrip("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return line.removeprefix(CONFIG_HASH) if line.startswith(CONFIG_HASH) else None


def _newest(plan: Plan) -> Path | None:
    """The newest run of this plan under outputs/, the default place of runs, that can resume.

    Runs are skipped if they save other files, continue another run, or are finished on other data.
    """
    there = DataThere()
    begun = {path.parent: path.stat().st_mtime_ns for path in project_root().glob("outputs/*/*/config.yaml")}
    for folder in sorted(begun, key=lambda folder: (begun[folder], folder), reverse=True):
        if config_hash_in(folder) != plan.config_hash or leaves_otherwise(folder, plan):
            continue
        if recorded_config(folder / "config.yaml").get("resume") not in (None, AUTO):
            continue
        if not is_finished(folder, plan) or there.same(folder, plan):
            return folder
    return None


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Lock a folder against other runs. Raises `UserError` if another run has locked it."""
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
        if [path.name for path in folder.iterdir()] == [_LOCK]:  # the run wrote no files
            with suppress(OSError):
                (folder / _LOCK).unlink()
