"""A sweep: runs those jobs of a study that are not finished yet, and tells what became of them."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock, Timeout
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from fedspa.checkpoints.data_there import DataThere
from fedspa.checkpoints.resuming import AUTO, config_hash_in, has_checkpoint, is_finished, leaves_otherwise
from fedspa.config.plan import Plan, check
from fedspa.core.errors import UserError, brief
from fedspa.core.paths import SET_ASIDE, project_root
from fedspa.studies.jobs import Study
from fedspa.studies.launchers import CONSOLE, JobFailed, cores_of_a_job, jobs_get_signals, side_by_side
from fedspa.studies.progress import Progress, outcome, table
from fedspa.tracking.sweep_run import Parent, nested_in

Launch: TypeAlias = Callable[[Sequence[Sequence[str]], int], Sequence[JobReturn]]
"""Runs jobs, given the overrides of each and the number of the first; one that failed raised `JobFailed`."""

PROGRESS_SECONDS = 5.0
"""Longest silence while configs are checked."""


@dataclass(frozen=True)
class PlannedJob:
    """A job, and all that is known of it before it runs."""

    name: str
    overrides: tuple[str, ...]
    folder: Path
    plan: Plan | UserError
    """The mistake in its config, where there is one."""

    @property
    def finished(self) -> bool:
        """Whether its folder holds the finished run of just this config, on whatever data."""
        return isinstance(self.plan, Plan) and is_finished(self.folder, self.plan.config_hash)

    @property
    def resumable(self) -> bool:
        """Whether its folder holds the beginning of the run of just this config, and a checkpoint of it."""
        if not isinstance(self.plan, Plan) or config_hash_in(self.folder) != self.plan.config_hash:
            return False
        return has_checkpoint(self.folder) and not leaves_otherwise(self.folder, self.plan)


@dataclass(frozen=True)
class Sweeps:
    """Runs studies, with what Hydra provides."""

    root: Path
    """The folder of all studies."""
    compose: Callable[[Sequence[str]], DictConfig]
    """The config of a job from its overrides."""
    launch: Launch
    launcher: Mapping[str, Any]
    """Hydra's config of the launcher."""

    def run(self, study: Study, parent: Parent | None = None) -> int:
        """Run the jobs that are not finished, each in its folder root/study/job. Returns their highest exit code.

        `parent`: the run in MLflow of a search, which locks the study's folder itself (`only_one`) and concludes.

        Every job is composed before the first one starts, so that what Hydra refuses is told at once. Raises
        `UserError` if the same study is running already, or if MLflow cannot be had.
        """
        folder = self.root / study.name
        print(f"{study.name}: {len(study.jobs)} jobs, in {folder}", flush=True)
        jobs = list(self._planned(study))
        for job in jobs:
            if isinstance(job.plan, Plan) and (resume := job.plan.settings.resume) not in (None, AUTO):
                raise UserError(
                    f"resume={resume} names one run, but a sweep goes on with all of its own: leave it out."
                )
        if any(isinstance(job.plan, Plan) and job.plan.settings.dry_run for job in jobs):
            return _list(jobs)
        if parent is not None:
            return _tell(self._run(jobs, parent), len(jobs))
        loggers = next((job.plan.loggers for job in jobs if isinstance(job.plan, Plan)), {})
        with only_one(self.root, study.name), nested_in(study.name, loggers) as run:
            failures = self._run(jobs, run)
        if results := table([job.folder for job in jobs if job.finished]):
            usual = folder.parent == project_root() / "outputs" / "sweeps"
            report = f"sweep={study.name}" if usual else f"runs={folder}"
            print(f"\n{results}\n\nReport: python src/report.py {shlex.quote(report)}", flush=True)
        return _tell(failures, len(jobs))

    def _planned(self, study: Study) -> Iterator[PlannedJob]:
        """The study's jobs, composed and checked; says how far it is, since a large study takes a minute."""
        said = time.monotonic()
        for count, job in enumerate(study.jobs):
            if time.monotonic() - said > PROGRESS_SECONDS:
                print(f"{count} of {len(study.jobs)} configs are checked.", file=sys.stderr, flush=True)
                said = time.monotonic()
            config = self.compose(job.overrides)
            try:
                plan: Plan | UserError = check(config)
            except UserError as mistake:
                plan = mistake
            yield PlannedJob(job.name, job.overrides, self.root / study.name / job.name, plan)

    def _run(self, jobs: Sequence[PlannedJob], parent: Parent) -> dict[str, JobFailed]:
        """Run what is not finished; returns the failures by job."""
        done = _finished(jobs)
        todo = [job for job in jobs if job not in done]
        if done:
            print(f"{len(done)} of them are finished already.", flush=True)
        if begun := sum(job.resumable for job in todo):
            print(f"{begun} of them go on from a checkpoint.", flush=True)
        for job in todo:
            if not job.resumable:
                set_aside(job.folder)
        failures = self._launch(todo, parent) if todo else {}
        parent.failed += len(failures)
        for job in jobs:
            failure = failures.get(job.name)
            told = failure.reason if failure else outcome(job.folder) if job.finished else "not run"
            parent.outcomes[job.name] = told
        return failures

    def _launch(self, todo: Sequence[PlannedJob], parent: Parent) -> dict[str, JobFailed]:
        """Run the jobs; returns the failures by job."""
        beside, progress = side_by_side(self.launcher), Progress(len(todo))
        cores = cores_of_a_job(self.launcher, len(todo)) if beside else None
        overrides = [[*job.overrides, *_place(job, cores), *parent.overrides(job.name)] for job in todo]
        returned: list[JobReturn] = []
        if not beside:
            for number, job in enumerate(todo):
                progress.begin(job.name)
                returned += self.launch([overrides[number]], number)
                progress.done += 1
        else:
            print(f"The console of each job is {CONSOLE} in its folder.", flush=True)
            # Processes to come import this very package, wherever another copy of it may be installed.
            paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            watching = progress.watching(lambda: {j.name: outcome(j.folder) for j in todo if j.finished})
            try:
                with watching, jobs_get_signals():
                    returned += self.launch(overrides, 0)
            except Exception as error:  # not of a job: a process was killed, or there is no queue
                lost = JobFailed(2, f"not finished: {type(error).__name__} in the launcher: {brief(error)}")
                return {job.name: lost for job in todo if not job.finished}
        return {
            job.name: _failure(result)
            for job, result in zip(todo, returned, strict=True)
            if result.status is not JobStatus.COMPLETED
        }


def _place(job: PlannedJob, cores: int | None) -> list[str]:
    """The folder of a job, and its cores if it runs beside others and its config does not say how many."""
    given = isinstance(job.plan, Plan) and job.plan.hardware.cores is not None
    share = [] if cores is None or given else [f"hardware.cores={cores}"]
    return [f"hydra.sweep.subdir='{job.folder.parent.name}/{job.name}'", f"resume={AUTO}", *share]


def _list(jobs: Sequence[PlannedJob]) -> int:
    """Say what the jobs would cost."""
    from fedspa.planning.dry_run import listing

    plans = {job.name: job.plan for job in jobs if isinstance(job.plan, Plan)}
    if plans:
        print(listing(plans, finished=[job.name for job in _finished(jobs)]))
    failures = {job.name: JobFailed(2, str(job.plan)) for job in jobs if job.name not in plans}
    return _tell(failures, len(jobs))


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


def _failure(result: JobReturn) -> JobFailed:
    error = result._return_value  # the property of that name would print a line, and raise
    return error if isinstance(error, JobFailed) else JobFailed(1, f"{type(error).__name__}: {error}")


def _tell(failures: Mapping[str, JobFailed], jobs: int) -> int:
    """A table of what failed; returns the exit code."""
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
    root.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(root / f".{name}.lock", blocking=False):
            yield
    except Timeout as error:
        raise UserError(
            f"The sweep {name} is running in {root} already: wait for its end, or give another hydra.sweep.dir."
        ) from error
