"""A sweep: runs those jobs of a study that are not finished yet, and tells what became of them."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from fedspa.checkpoints.data_there import DataThere
from fedspa.checkpoints.resuming import AUTO, config_hash_in, has_checkpoint, is_finished, leaves_otherwise
from fedspa.config.plan import Plan, check
from fedspa.core.errors import UserError, brief
from fedspa.core.paths import SET_ASIDE
from fedspa.studies.launchers import CONSOLE, Launching, watched
from fedspa.studies.studies import Study
from fedspa.tracking.mlflow_sweep import Parent, nested_in

Compose: TypeAlias = Callable[[Sequence[str]], DictConfig]
"""The config of one job from its overrides."""
Launch: TypeAlias = Callable[[Sequence[Sequence[str]], int], Sequence[JobReturn]]
"""Runs jobs, given the overrides of each and the number of the first; one that failed raised `JobFailed`."""


PROGRESS_SECONDS = 5.0
"""Longest silence while configs are checked."""


class JobFailed(Exception):
    """A job of a sweep failed, and has said so. Plain values, since it may come from another process."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


@dataclass(frozen=True)
class PlannedJob:
    """A job, and all that is known of it before it runs."""

    name: str
    overrides: tuple[str, ...]
    folder: Path
    plan: Plan | UserError
    """The mistake that its config holds, where it holds one."""

    @property
    def finished(self) -> bool:
        """Whether its folder holds the finished run of just this config, on whatever data."""
        return isinstance(self.plan, Plan) and is_finished(self.folder, self.plan.config_hash)

    @property
    def resumable(self) -> bool:
        """Whether its folder holds the beginning of the run of just this config, and a checkpoint of it."""
        if not isinstance(self.plan, Plan):
            return False
        begun = config_hash_in(self.folder) == self.plan.config_hash
        return begun and has_checkpoint(self.folder) and not leaves_otherwise(self.folder, self.plan)


def run_sweep(
    study: Study,
    root: Path,
    compose: Compose,
    launch: Launch,
    launcher: Mapping[str, Any],
    parent: Parent | None = None,
) -> int:
    """Run the jobs that are not finished, each in its folder root/study/job. Returns the exit code of all together.

    `launcher` is Hydra's config of what launches. `parent` is given where these jobs are only some of a sweep, which
    its caller keeps for itself (`only_one`) and shows in MLflow as this one run. Every job is composed before the
    first one starts, so what Hydra refuses is told at once.
    Raises `UserError` where the same study is running already, or where MLflow cannot be had.
    """
    folder = root / study.name
    print(f"{study.name}: {len(study.jobs)} jobs, in {folder}", flush=True)
    jobs = list(_planned(study, folder, compose))
    for job in jobs:
        if isinstance(job.plan, Plan) and (resume := job.plan.settings.resume) not in (None, AUTO):
            raise UserError(
                f"resume={resume} names one run, but a sweep goes on with all of its own: leave it out."
            )
    if any(isinstance(job.plan, Plan) and job.plan.settings.dry_run for job in jobs):
        return _list(jobs)
    if parent is not None:
        return _run(jobs, launch, launcher, parent)
    loggers = next((job.plan.loggers for job in jobs if isinstance(job.plan, Plan)), {})
    with only_one(root, study.name), nested_in(study.name, loggers) as run:
        return _run(jobs, launch, launcher, run)


def _planned(study: Study, folder: Path, compose: Compose) -> Iterator[PlannedJob]:
    """The study's jobs, composed and checked; says how far it is, since a large study takes a minute."""
    said = time.monotonic()
    for count, job in enumerate(study.jobs):
        if time.monotonic() - said > PROGRESS_SECONDS:
            print(f"{count} of {len(study.jobs)} configs are checked.", file=sys.stderr, flush=True)
            said = time.monotonic()
        yield PlannedJob(job.name, job.overrides, folder / job.name, _plan(compose(job.overrides)))


def _plan(config: DictConfig) -> Plan | UserError:
    try:
        return check(config)
    except UserError as mistake:
        return mistake


def _list(jobs: Sequence[PlannedJob]) -> int:
    """Say what the jobs would cost."""
    from fedspa.planning.dry_run import listing

    plans = {job.name: job.plan for job in jobs if isinstance(job.plan, Plan)}
    if plans:
        print(listing(plans, finished=[job.name for job in _finished(jobs)]))
    return _conclude(
        {job.name: JobFailed(2, str(job.plan)) for job in jobs if job.name not in plans}, len(jobs)
    )


def _finished(jobs: Sequence[PlannedJob]) -> list[PlannedJob]:
    """The jobs that need not run: finished, with all that they are to leave, on the data that there is now."""
    there = DataThere()
    return [
        job
        for job in jobs
        if isinstance(job.plan, Plan)
        and job.finished
        and not leaves_otherwise(job.folder, job.plan)
        and there.same(job.folder, job.plan)
    ]


def _run(jobs: Sequence[PlannedJob], launch: Launch, launcher: Mapping[str, Any], parent: Parent) -> int:
    """Run what is not finished."""
    done = _finished(jobs)
    todo = [job for job in jobs if job not in done]
    if len(todo) < len(jobs):
        print(f"{len(jobs) - len(todo)} of them are finished already.", flush=True)
    if half_done := sum(job.resumable for job in todo):
        print(f"{half_done} of them go on from a checkpoint.", flush=True)
    for job in todo:
        if not job.resumable:
            set_aside(job.folder)
    launching = Launching.by(launcher, max(len(todo), 1))
    places = [f"hydra.sweep.subdir='{job.folder.parent.name}/{job.name}'" for job in todo]
    overrides = [
        [*job.overrides, *parent.overrides(job.name), *_share(job, launching), place, f"resume={AUTO}"]
        for job, place in zip(todo, places, strict=True)
    ]
    failures = _launch(todo, overrides, launch, launching) if todo else {}
    parent.failed += len(failures)
    parent.outcomes |= {job.name: _told(job, failures.get(job.name)) for job in jobs}
    return _conclude(failures, len(todo))


def _share(job: PlannedJob, launching: Launching) -> list[str]:
    """The cores of a job that runs beside others, unless its config says how many."""
    given = isinstance(job.plan, Plan) and job.plan.hardware.cores is not None
    return [] if launching.cores is None or given else [f"hardware.cores={launching.cores}"]


def _launch(
    todo: Sequence[PlannedJob], overrides: Sequence[Sequence[str]], launch: Launch, launching: Launching
) -> dict[str, JobFailed]:
    """Run the jobs; what failed, by name."""
    if not launching.side_by_side:
        returned = launching.run(launch, overrides)
    else:
        print(f"What a job says is in {CONSOLE} of its folder.", flush=True)
        try:
            with watched(lambda: {job.name: _outcome(job.folder) for job in todo if job.finished}, len(todo)):
                returned = launching.run(launch, overrides)
        except Exception as error:  # no job's: a process was killed, a queue is not there
            lost = JobFailed(2, f"not finished: {type(error).__name__} in the launcher: {brief(error)}")
            return {job.name: lost for job in todo if not job.finished}
    return {
        job.name: _failure(result)
        for job, result in zip(todo, returned, strict=True)
        if result.status is not JobStatus.COMPLETED
    }


def _told(job: PlannedJob, failure: JobFailed | None) -> str:
    return failure.reason if failure else _outcome(job.folder) if job.finished else "not run"


def _outcome(folder: Path) -> str:
    """A finished run in a few words."""
    summary = json.loads((folder / "summary.json").read_text())
    means = [
        f"{kind} {spread['mean']:.1f} %" for kind, spread in summary.get("accuracy", {}).items() if spread
    ]
    return ", ".join(means) or "finished"


def _failure(result: JobReturn) -> JobFailed:
    error = result._return_value  # the property of that name would print a line, and raise
    return error if isinstance(error, JobFailed) else JobFailed(1, f"{type(error).__name__}: {error}")


def _conclude(failures: Mapping[str, JobFailed], jobs: int) -> int:
    """A table of what failed; the exit code."""
    if not failures:
        return 0
    width = max(map(len, failures))
    print(f"\n{len(failures)} of {jobs} jobs failed:", file=sys.stderr)
    for name, failure in failures.items():
        print(f"  {name:<{width}}  {failure.reason}", file=sys.stderr)
    return max(failure.code for failure in failures.values())


def set_aside(folder: Path) -> None:
    """Make room for a job: what another config left there, or a run without a checkpoint, is moved, not deleted."""
    if not folder.exists():
        return
    shelf = folder.parent / SET_ASIDE
    shelf.mkdir(exist_ok=True)
    tries = (shelf / f"{folder.name}-{count}" for count in itertools.count(1))
    folder.rename(next(path for path in tries if not path.exists()))


@contextmanager
def only_one(root: Path, name: str) -> Iterator[None]:
    """Two processes that run one study would take each other's unfinished jobs for broken ones."""
    from filelock import FileLock, Timeout

    root.mkdir(parents=True, exist_ok=True)
    lock = FileLock(root / f".{name}.lock", blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"The sweep {name} is running in {root} already: wait for its end, or give another hydra.sweep.dir."
        ) from error
    try:
        yield
    finally:
        lock.release()
