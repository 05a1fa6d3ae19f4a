"""A sweep: runs those jobs of a study that are not finished yet, and tells what became of them."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from fedspa.config import Plan, check
from fedspa.errors import UserError
from fedspa.studies import Study
from fedspa.tracking.mlflow_sweep import nested_in

SET_ASIDE = "set_aside"
"""The folder, beside those of the jobs, for what was in a job's way."""

Compose: TypeAlias = Callable[[Sequence[str]], DictConfig]
"""The config of one job from its overrides."""
Launch: TypeAlias = Callable[[Sequence[Sequence[str]]], Sequence[JobReturn]]
"""Runs jobs, given the overrides of each; one that failed raised `JobFailed`."""


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
    plan: Plan | None
    """None: its config holds a mistake, of which the job will tell."""

    @property
    def finished(self) -> bool:
        """Whether its folder holds the finished run of just this config."""
        try:
            summary = json.loads((self.folder / "summary.json").read_text())
        except (OSError, ValueError):
            return False
        return self.plan is not None and summary["config_hash"] == self.plan.config_hash


def run_sweep(study: Study, root: Path, compose: Compose, launch: Launch) -> int:
    """Run the jobs that are not finished, each in its folder root/study/job. Returns the exit code of all together.

    Every job is composed before the first one starts, so what Hydra refuses is told at once. Raises `UserError`
    where the same study is running already, or where MLflow cannot be had.
    """
    folder = root / study.name
    jobs = [
        PlannedJob(job.name, job.overrides, folder / job.name, _checked(compose(job.overrides))) for job in study.jobs
    ]
    if any(job.plan and job.plan.settings.dry_run for job in jobs):
        from fedspa.dry_run import listing

        print(listing(jobs))
        return 0
    with _only_one(root, study.name):
        todo = [job for job in jobs if not job.finished]
        print(f"{study.name}: {len(jobs)} jobs, {len(jobs) - len(todo)} of them finished already, in {folder}")
        return _run_jobs(study.name, todo, launch) if todo else 0


def _run_jobs(name: str, jobs: Sequence[PlannedJob], launch: Launch) -> int:
    for job in jobs:
        set_aside(job.folder)
    loggers = next((job.plan.loggers for job in jobs if job.plan), {})
    with nested_in(name, loggers) as parent:
        returned = launch([[*job.overrides, *parent.overrides, f"hydra.sweep.subdir='{name}/{job.name}'"] for job in jobs])
        failures = {
            job.name: _failure(result)
            for job, result in zip(jobs, returned, strict=True)
            if result.status is not JobStatus.COMPLETED
        }
        parent.failed = len(failures)
    if failures:
        width = max(map(len, failures))
        print(f"\n{len(failures)} of {len(jobs)} jobs failed:", file=sys.stderr)
        for job_name, failure in failures.items():
            print(f"  {job_name:<{width}}  {failure.reason}", file=sys.stderr)
    return max((failure.code for failure in failures.values()), default=0)


def set_aside(folder: Path) -> None:
    """Make room for a job: what a run left there that broke off, or that had another config, is moved, not deleted."""
    if not folder.exists():
        return
    shelf = folder.parent / SET_ASIDE
    shelf.mkdir(exist_ok=True)
    tries = (shelf / f"{folder.name}-{count}" for count in itertools.count(1))
    folder.rename(next(path for path in tries if not path.exists()))


def _checked(config: DictConfig) -> Plan | None:
    try:
        return check(config)
    except UserError:
        return None


def _failure(result: JobReturn) -> JobFailed:
    error = result._return_value  # its property of that name would print a line and raise
    if isinstance(error, JobFailed):
        return error
    return JobFailed(1, f"{type(error).__name__}: {error}")


@contextmanager
def _only_one(root: Path, name: str) -> Iterator[None]:
    """Two processes that run one study would take each other's unfinished jobs for broken ones."""
    from filelock import FileLock, Timeout

    root.mkdir(parents=True, exist_ok=True)
    lock = FileLock(root / f".{name}.lock", blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"The sweep {name} is running in {root} already: wait for it, or give this one another folder by hydra.sweep.dir."
        ) from error
    try:
        yield
    finally:
        lock.release()
