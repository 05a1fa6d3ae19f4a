"""A search for good settings with Optuna: the sweep's next jobs follow from what its earlier ones reached.

Settings are judged on validation rows alone, which no client trains on and which are none of its test rows. A trial is
a job of a sweep as any other: with its folder, its run in MLflow, and launchers. Optuna's journal lies beside the
jobs' folders; started again, the search goes on with it, first with the trials that were broken off.
"""

from __future__ import annotations

import csv
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep

from fedspa.config.plan import Plan
from fedspa.core.errors import UserError, brief, check_choice, check_range
from fedspa.core.file_names import file_name
from fedspa.core.randomness import numpy_generator
from fedspa.core.records import ACCURACY, MAIN_KINDS, VALIDATION
from fedspa.studies.ranges import Range
from fedspa.studies.studies import Job, Study, is_neutral
from fedspa.studies.sweep import only_one
from fedspa.tracking.mlflow_sweep import Parent, nested_in

if TYPE_CHECKING:
    import optuna

JOURNAL = "search.journal"
QUESTION = "question"
"""What a search asks, as it stands in its journal: trials of another question are not comparable."""
RunJobs = Callable[[Study, Parent], int]
"""Runs what is not finished of a study's jobs, nested below the search in MLflow; returns the exit code."""


@dataclass(frozen=True)
class Space:
    """What a search varies, and what it leaves as it is."""

    varied: Mapping[str, Override]
    fixed: tuple[str, ...]
    name: str
    """Of the study's folder: what is varied, and the fixed settings that decide results."""

    @classmethod
    def of(cls, params: Mapping[str, str], arguments: Sequence[str], parser: OverridesParser) -> Space:
        """`params`: the space of a file; what the command line adds wins. Raises `UserError` for an empty space."""
        given = [*(f"{key}={values}" for key, values in params.items()), *arguments]
        last = {override.get_key_element(): override for override in parser.parse_overrides(given)}
        varied = {key: override for key, override in last.items() if override.is_sweep_override()}
        if not varied:
            raise UserError(
                "hydra/sweeper=search has nothing to vary: give a space such as training.lr=interval(0.01,0.5)."
            )
        fixed = {key: override.input_line or "" for key, override in last.items() if key not in varied}
        told = [text for key, text in fixed.items() if key == "sweep" or not is_neutral(key)]
        return cls(
            varied, tuple(fixed.values()), file_name(["search", "+".join(sorted(varied)), *sorted(told)])
        )

    def distributions(self) -> dict[str, Any]:
        """Each varied setting as Optuna takes it. Raises `UserError` for a range that has no values."""
        return {key: _distribution(key, override) for key, override in sorted(self.varied.items())}

    def job(self, values: Mapping[str, Any]) -> Job:
        """The job of a trial with these values."""
        texts = [f"{key}={value}" for key, value in sorted(values.items())]
        return Job(file_name(texts), (*self.fixed, *texts))


def _distribution(key: str, override: Override) -> Any:
    from optuna import distributions

    value = override.value()
    sweep: Any = value
    log = "log" in getattr(value, "tags", ())
    try:
        if isinstance(value, ChoiceSweep):
            return distributions.CategoricalDistribution(sorted(set(override.sweep_string_iterator())))
        if isinstance(value, RangeSweep):
            grid = Range.of(value)
            (low, high), step = grid.bounds, abs(grid.step)
            if grid.whole:
                return distributions.IntDistribution(int(low), int(high), log, int(step))
            return distributions.FloatDistribution(float(low), float(high), log, float(step))
        return distributions.FloatDistribution(float(sweep.start), float(sweep.end), log)
    except (ValueError, ArithmeticError) as error:
        raise UserError(f"{override.input_line or key} cannot be searched: {brief(error)}.") from error


def _short(value: Any, distribution: Any) -> Any:
    """A drawn value with no more digits than matter to a search: they stand in names and commands."""
    if not isinstance(value, float):
        return value
    low, high, step = distribution.low, distribution.high, distribution.step
    if step:  # counted in decimals: 0.1 + 2 * 0.1 is 0.3
        return float(Decimal(str(low)) + round((value - low) / step) * Decimal(str(step)))
    scale = min(high - low, value) if distribution.log else high - low
    if not scale:
        return value
    return min(max(round(value, 3 - math.floor(math.log10(scale))), low), high)


@dataclass(frozen=True)
class Search:
    """How the space is searched; the options of conf/hydra/sweeper/search.yaml."""

    trials: int
    at_once: int
    seed: int
    kind: str | None

    def __post_init__(self) -> None:
        if find_spec("optuna") is None:
            raise UserError("hydra/sweeper=search needs Optuna: pip install 'fedspa[optuna]'.")
        for option, low in (("trials", 1), ("at_once", 1), ("seed", 0)):
            value = getattr(self, option)
            if type(value) is not int:
                raise UserError(f"hydra.sweeper.{option}={value} is not a whole number.")
            check_range(f"hydra.sweeper.{option}", value, low=low)
        if self.kind is not None:
            check_choice("hydra.sweeper.kind", self.kind, MAIN_KINDS)

    def run(self, space: Space, root: Path, check: Callable[[Sequence[str]], Plan], run_jobs: RunJobs) -> int:
        """Run the trials that are missing, and tell of the best. Returns the highest exit code of any.

        `check` makes the plan of a job from its overrides. Raises `UserError` where nothing is held out to judge by,
        and where the folder holds the trials of another search.
        """
        distributions = space.distributions()
        plan = check((*space.fixed, *(f"{key}={_any(d)}" for key, d in distributions.items())))
        kind = self._judged_by(plan)
        ranges = {key: _words(distribution) for key, distribution in distributions.items()}
        folder = root / space.name
        question = {"kind": kind, "seed": str(self.seed)} | ranges | {"config_hash": plan.config_hash}
        with only_one(root, space.name):
            study, code = _open(folder), 0
            _ask_only(study, folder, question)
            with nested_in(space.name, plan.loggers) as parent:
                for trial in study.trials:
                    if trial.state.is_finished():
                        parent.failed += trial.value is None
                        parent.outcomes[space.job(trial.params).name] = _told(trial.value)
                while waiting := self._next(study, distributions):
                    jobs = {number: space.job(values) for number, values in waiting.items()}
                    once = dict.fromkeys(jobs.values())  # of few choices, two trials may be the same job
                    code = max(code, run_jobs(Study(space.name, tuple(once)), parent))
                    for number, job in jobs.items():
                        score = validation_score(folder / job.name, kind)
                        study.tell(number, score, state=None if score is not None else _failed())
                        if score is not None:
                            parent.outcomes[job.name] = _told(score)
            return max(code, self._conclude(study, space, kind))

    def _judged_by(self, plan: Plan) -> str:
        if plan.settings.dry_run:
            raise UserError(
                "hydra/sweeper=search cannot tell its jobs before they run: leave out dry_run=true."
            )
        if not plan.dataset.val_fraction:
            raise UserError(
                "hydra/sweeper=search chooses by validation rows, and there are none: set dataset.val_fraction=0.2."
            )
        kind = self.kind or next(kind for kind in MAIN_KINDS if kind in plan.method.kinds)
        if kind not in plan.method.kinds:
            raise UserError(
                f"hydra.sweeper.kind={kind} is no model of method={plan.method.name}: "
                f"it must be one of {', '.join(plan.method.kinds)}."
            )
        return kind

    def _next(self, study: optuna.Study, distributions: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """The values of the next trials by number: a batch that was broken off, else a new one; none at the end.

        Batches begin at multiples of `at_once`. Seeded by its number, a trial draws what follows from the batches
        before its own, whether or not the search was broken off in between.
        """
        import optuna
        from optuna.samplers import TPESampler
        from optuna.trial import TrialState, create_trial

        values = {trial.number: trial.params for trial in study.get_trials(states=[TrialState.RUNNING])}
        known = len(study.trials)
        batches = math.ceil(known / self.at_once) if values else known // self.at_once + 1
        # Drawn apart: `study.ask` writes to the journal value by value, and a kill would leave half a trial there.
        apart = optuna.create_study(direction="maximize")
        apart.add_trials(study.trials)
        for number in range(known, min(self.trials, batches * self.at_once)):
            seed = int(numpy_generator(self.seed, "search", number).integers(2**31))
            apart.sampler = TPESampler(seed=seed)
            drawn = apart.ask(dict(distributions)).params
            values[number] = {key: _short(value, distributions[key]) for key, value in drawn.items()}
            study.add_trial(
                create_trial(
                    state=TrialState.RUNNING, params=values[number], distributions=dict(distributions)
                )
            )
        return values

    def _conclude(self, study: optuna.Study, space: Space, kind: str) -> int:
        scored = [trial for trial in study.trials if trial.value is not None]
        if not scored:
            return 1
        best = max(scored, key=lambda trial: (trial.value, -trial.number))
        command = ["python", "src/train.py", *space.job(best.params).overrides]
        print(
            f"\nBest of {len(study.trials)} trials: {kind} accuracy {best.value:.2f} % on validation rows, "
            f"in trial {best.number + 1}:\n  {shlex.join(command)}"
        )
        return 0


def validation_score(folder: Path, kind: str) -> float | None:
    """A finished run's accuracy in percent on validation rows, of its last tested rounds; None where there is none."""
    from omegaconf import OmegaConf

    if not (folder / "summary.json").exists():
        return None
    column = f"{kind}_{VALIDATION}{ACCURACY}_mean"
    with (folder / "rounds.csv").open(newline="") as file:
        scores = [float(row[column]) for row in csv.DictReader(file) if row.get(column)]
    rounds = OmegaConf.load(folder / "config.yaml").eval.final_rounds
    return fmean(scores[-rounds:]) if scores else None


def _any(distribution: Any) -> Any:
    return distribution.choices[0] if hasattr(distribution, "choices") else distribution.low


def _words(distribution: Any) -> str:
    """A distribution as one can read it; the same words for the same values."""
    if hasattr(distribution, "choices"):
        return ",".join(distribution.choices)
    step = f" by {distribution.step}" if distribution.step else ""
    return f"{distribution.low}..{distribution.high}{step}{' log' if distribution.log else ''}"


def _ask_only(study: optuna.Study, folder: Path, question: Mapping[str, str]) -> None:
    """Note the question of a new search; raises `UserError` where the trials there are answers to another one."""
    if not study.trials:
        study.set_user_attr(QUESTION, dict(question))
        return
    earlier = study.user_attrs.get(QUESTION, {})
    differing = [key for key, value in question.items() if earlier.get(key) != value]
    if differing:
        there = ", ".join(f"{key}={earlier.get(key, 'unknown')}" for key in differing)
        here = ", ".join(f"{key}={question[key]}" for key in differing)
        raise UserError(
            f"{folder} holds another search, with {there} where this one has {here}: "
            "go on with that, or begin this one in another folder by hydra.sweep.dir=<folder>."
        )


def _told(score: float | None) -> str:
    return "failed" if score is None else f"{score:.2f} % on validation rows"


def _failed() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL


def _open(folder: Path) -> optuna.Study:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    return optuna.create_study(
        study_name="search", storage=storage, direction="maximize", load_if_exists=True
    )
