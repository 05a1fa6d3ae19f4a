"""Runs those jobs of a study that are not finished yet."""

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
from typing import Any

from filelock import FileLock, Timeout
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from fedspa.checkpoints.data_there import DataThere
from fedspa.checkpoints.resuming import AUTO, config_hash_in, has_checkpoint, is_finished, leaves_otherwise
from fedspa.config.plan import Plan, check
from fedspa.core.errors import UserError, brief
from fedspa.core.paths import SET_ASIDE, project_root
from fedspa.core.roles import Role, settings_that
from fedspa.costs.units import show_count
from fedspa.studies.jobs import Job, Study
from fedspa.studies.launchers import CONSOLE, JobFailed, cores_of_a_job, jobs_get_signals, side_by_side
from fedspa.studies.progress import Progress
from fedspa.studies.results import means, outcome, scores
from fedspa.tracking.pictures import Pictures, save, study_picture
from fedspa.tracking.sweep_run import Parent, nested_in

PICTURE = "study.png"
"""In the folder of a study: the scores of all its runs."""
PROGRESS_SECONDS = 5.0
"""Longest silence while configs are checked."""


@dataclass(frozen=True)
class PlannedJob:
    """A job with its checked config."""

    job: Job
    folder: Path
    plan: Plan | UserError
    """The user's mistake, if the config has one."""

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def finished(self) -> bool:
        """True if its folder has the finished run of this config, on any data."""
        return isinstance(self.plan, Plan) and is_finished(self.folder, self.plan)

    @property
    def resumable(self) -> bool:
        """True if its folder has a checkpoint of this config's run."""
        if not isinstance(self.plan, Plan) or config_hash_in(self.folder) != self.plan.config_hash:
            return False
        return has_checkpoint(self.folder) and not leaves_otherwise(self.folder, self.plan)


@dataclass(frozen=True)
class Sweeps:
    """Runs studies with Hydra's launchers."""

    root: Path
    """The folder of all studies."""
    compose: Callable[[Sequence[str]], DictConfig]
    """Makes the config of a job from its overrides."""
    launch: Callable[[Sequence[Sequence[str]], int], Sequence[JobReturn]]
    """Runs jobs, given the overrides of each and the number of the first. A failed job raised `JobFailed`."""
    launcher: Mapping[str, Any]
    """Hydra's config of the launcher."""

    def run(self, study: Study) -> int:
        """Run the jobs that are not finished, each in its folder root/study/job. Returns their highest exit code.

        No job starts if the config of any has a mistake. Raises `UserError` if all have the same mistake, if the same
        study is already running, or if MLflow does not answer.
        """
        folder = self.root / study.name
        print(f"{study.name}: {show_count(len(study.jobs), 'job')}, in {folder}", flush=True)
        jobs = self.planned(study)
        mistakes = {job.name: str(job.plan) for job in jobs if isinstance(job.plan, UserError)}
        if len(mistakes) == len(jobs) and len(shared := set(mistakes.values())) == 1:
            raise UserError(shared.pop())
        if mistakes:
            failed = {name: JobFailed(2, text) for name, text in mistakes.items()}
            return _exit_code(failed, len(jobs), "cannot run, so no job is started")
        plans = {job.name: job.plan for job in jobs if isinstance(job.plan, Plan)}
        if repeats := _repeats(plans):
            print(repeats, flush=True)
        if any(plan.settings.dry_run for plan in plans.values()):
            from fedspa.planning.dry_run import listing

            print(listing(plans, finished=[job.name for job in finished(jobs)]))
            return 0
        loggers = next((plan.loggers for plan in plans.values()), {})
        with only_one(self.root, study.name), nested_in(study.name, loggers) as parent:
            done = finished(jobs)
            if done:
                print(f"{len(done)} of them are finished already.", flush=True)
            if begun := sum(job.resumable for job in jobs if job not in done):
                print(f"{begun} of them go on from a checkpoint.", flush=True)
            failures = self.run_missing(jobs, done, parent, Progress(len(jobs)))
            tables = scores((study.label(job.job), job.folder) for job in jobs if job.finished)
            parent.tables = [means(table) for table in tables]
            if tables and any(isinstance(logger, Pictures) for logger in loggers.values()):
                parent.picture = folder / PICTURE
                save(study_picture(tables[0]), parent.picture)
            if tables:
                shown = "\n\n".join(table.to_string(max_colwidth=None) for table in parent.tables)
                print(f"\n{shown}", flush=True)
        if tables:
            print(f"\nReport: {_report_command(folder)}", flush=True)
        return _exit_code(failures, len(jobs))

    def planned(self, study: Study) -> list[PlannedJob]:
        """The study's jobs, composed and checked. Prints its progress, since a large study takes a minute."""
        said, jobs = time.monotonic(), list[PlannedJob]()
        for job in study.jobs:
            if time.monotonic() - said > PROGRESS_SECONDS:
                checked = f"{len(jobs)} of {len(study.jobs)}"
                print(f"Checking the settings of all jobs: {checked} done.", file=sys.stderr, flush=True)
                said = time.monotonic()
            config = self.compose(job.overrides)
            try:
                plan: Plan | UserError = check(config)
            except UserError as mistake:
                plan = mistake
            if isinstance(plan, Plan) and plan.settings.resume not in (None, AUTO):
                raise UserError(
                    f"resume={plan.settings.resume} names one run, but a sweep goes on with all of its own: leave it "
                    "out."
                )
            jobs.append(PlannedJob(job, self.root / study.name / job.name, plan))
        return jobs

    def run_missing(
        self, jobs: Sequence[PlannedJob], done: Sequence[PlannedJob], parent: Parent, progress: Progress
    ) -> dict[str, JobFailed]:
        """Run the jobs that are not in `done`. Returns the failures by job."""
        todo = [job for job in jobs if job not in done]
        progress.skip(len(done))
        for job in todo:
            if not job.resumable:
                set_aside(job.folder)
        failures = self._launch(todo, parent, progress) if todo else {}
        parent.failed += len(failures)
        for job in jobs:
            failure = failures.get(job.name)
            result = failure.reason if failure else outcome(job.folder) if job.finished else "not run"
            parent.outcomes[job.name] = result
        return failures

    def _launch(self, todo: Sequence[PlannedJob], parent: Parent, progress: Progress) -> dict[str, JobFailed]:
        """Run the jobs. Returns the failures by job."""
        beside = side_by_side(self.launcher)
        cores = cores_of_a_job(self.launcher, len(todo)) if beside else None
        overrides = [
            [*job.job.overrides, *_place(job, cores), *parent.overrides(job.job.title)] for job in todo
        ]
        returned: list[JobReturn] = []
        if not beside:
            for number, job in enumerate(todo):
                progress.begin(job.name)
                returned += self.launch([overrides[number]], number)
                progress.done += 1
        else:
            print(f"The console of each job is {CONSOLE} in its folder.", flush=True)
            # The jobs' processes import this package, even if another copy of it is installed.
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


def _repeats(plans: Mapping[str, Plan]) -> str:
    """A line on the jobs that differ from an earlier one only in unused settings; "" if there are none."""
    first: dict[str, str] = {}
    again = {
        name: one for name, plan in plans.items() if (one := first.setdefault(_used(plan), name)) != name
    }
    pairs = "; ".join(f"{name} repeats {one}" for name, one in again.items())
    return pairs and f"Jobs that differ from another one only in settings that they do not use: {pairs}."


def _used(plan: Plan) -> str:
    """All that decides what a run computes, how, and what it leaves."""
    kept = settings_that(plan.resolved, Role.KEEPS)
    return repr((plan.config_hash, kept, plan.resolved["engine"], plan.resolved["hardware"]))


def _report_command(folder: Path) -> str:
    """The command that reports a study."""
    usual = folder.parent == project_root() / "outputs" / "sweeps"
    return f"python src/report.py {shlex.quote(f'sweep={folder.name}' if usual else f'runs={folder}')}"


def _place(job: PlannedJob, cores: int | None) -> list[str]:
    """The folder of a job, and its cores if it runs beside others and its config does not name them."""
    given = isinstance(job.plan, Plan) and job.plan.hardware.cores is not None
    share = [] if cores is None or given else [f"hardware.cores={cores}"]
    return [f"hydra.sweep.subdir='{job.folder.parent.name}/{job.name}'", f"resume={AUTO}", *share]


def finished(jobs: Sequence[PlannedJob]) -> list[PlannedJob]:
    """The jobs that need not run: finished, with all their files, on today's data."""
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


def _exit_code(failures: Mapping[str, JobFailed], jobs: int, what: str = "failed") -> int:
    """The highest exit code of the failures, which are printed as a table."""
    if not failures:
        return 0
    width = max(map(len, failures))
    print(f"\n{len(failures)} of {show_count(jobs, 'job')} {what}:", file=sys.stderr)
    for name, failure in failures.items():
        print(f"  {name:<{width}}  {failure.reason}", file=sys.stderr)
    return max(failure.code for failure in failures.values())


def set_aside(folder: Path) -> None:
    """Move a job's folder away that has another config's run, or a run without a checkpoint."""
    if not folder.exists():
        return
    shelf = folder.parent / SET_ASIDE
    shelf.mkdir(exist_ok=True)
    tries = (shelf / f"{folder.name}-{count}" for count in itertools.count(1))
    folder.rename(next(path for path in tries if not path.exists()))


@contextmanager
def only_one(root: Path, name: str) -> Iterator[None]:
    """Lock a study. Two processes that run one study would take each other's unfinished jobs for broken ones."""
    root.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(root / f".{name}.lock", blocking=False):
            yield
    except Timeout as error:
        raise UserError(
            f"The sweep {name} is running in {root} already: wait for its end, or give another hydra.sweep.dir."
        ) from error
