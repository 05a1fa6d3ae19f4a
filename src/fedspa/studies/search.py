"""A search for good settings with Optuna: the next jobs of the sweep follow from the results of the earlier ones.

Settings are judged on validation rows alone: no client trains on them, and they are none of its test rows. A trial is
a job of a sweep like any other, with its folder, its run in MLflow, and launchers. Optuna's journal lies beside the
jobs' folders; started again, the search goes on with it, first with the trials that were broken off.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from omegaconf import OmegaConf

from fedspa.config.plan import Plan
from fedspa.core.errors import UserError, brief, check_choice, check_range
from fedspa.core.file_names import file_name
from fedspa.core.names import is_error, main_metric, score
from fedspa.core.randomness import numpy_generator
from fedspa.core.records import MAIN_KINDS, VALIDATION
from fedspa.studies.jobs import Job, Study, is_neutral, numbers_of
from fedspa.studies.sweep import only_one
from fedspa.tracking.sweep_run import Parent, nested_in

JOURNAL = "search.journal"
RunJobs = Callable[[Study, Parent], int]
"""Runs what is not finished of a study's jobs, nested below the search in MLflow; returns the exit code."""


@dataclass(frozen=True)
class Space:
    """The settings that a search varies, and those that it leaves as they are."""

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
        shown = [text for key, text in fixed.items() if key == "sweep" or not is_neutral(key)]
        name = file_name(["search", "+".join(sorted(varied)), *sorted(shown)])
        return cls(varied, tuple(fixed.values()), name)

    def distributions(self) -> dict[str, Any]:
        """Optuna's distribution of each varied setting. Raises `UserError` for a range that has no values."""
        return {key: _distribution(override) for key, override in sorted(self.varied.items())}

    def job(self, values: Mapping[str, Any]) -> Job:
        """The job of a trial with these values."""
        texts = [f"{key}={value}" for key, value in sorted(values.items())]
        return Job(file_name(texts), (*self.fixed, *texts))


def _distribution(override: Override) -> Any:
    from optuna import distributions

    sweep: Any = override.value()
    log = "log" in getattr(sweep, "tags", ())
    try:
        if isinstance(sweep, ChoiceSweep):
            return distributions.CategoricalDistribution(sorted(set(override.sweep_string_iterator())))
        if not isinstance(sweep, RangeSweep):
            return distributions.FloatDistribution(float(sweep.start), float(sweep.end), log)
        numbers = numbers_of(sweep)
        kind: Any = distributions.FloatDistribution
        if isinstance(numbers[0], int):
            kind = distributions.IntDistribution
        return kind(min(numbers), max(numbers), log, abs(type(numbers[0])(sweep.step)))
    except (ValueError, ArithmeticError) as error:
        raise UserError(f"{override.input_line} cannot be searched: {brief(error)}.") from error


def _short(value: Any, distribution: Any) -> Any:
    """A drawn value in few digits, since it stands in names and commands: four, or for a range its own."""
    if not isinstance(value, float):
        return value
    rounded = float(f"{value:.12g}" if distribution.step else f"{value:.4g}")
    return min(max(rounded, distribution.low), distribution.high)


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

        `check` makes the plan of a job from its overrides. Raises `UserError` where there are no validation rows.
        """
        distributions = space.distributions()
        plan = check((*space.fixed, *(f"{key}={_any(d)}" for key, d in distributions.items())))
        kind, folder, code = self._judged_by(plan), root / space.name, 0
        with only_one(root, space.name):
            study = self._study(folder, distributions, f"{kind} {plan.config_hash}")
            with nested_in(space.name, plan.loggers) as parent:
                for trial in study.trials:
                    if trial.state.is_finished():
                        parent.failed += trial.value is None
                        parent.outcomes[space.job(trial.params).name] = _outcome(trial.value)
                while waiting := self._next(study, distributions):
                    jobs = {number: space.job(values) for number, values in waiting.items()}
                    once = dict.fromkeys(jobs.values())  # of few choices, two trials may be the same job
                    code = max(code, run_jobs(Study(space.name, tuple(once)), parent))
                    for number, job in jobs.items():
                        score = validation_score(folder / job.name, kind)
                        study.tell(number, score, skip_if_finished=False, state=_state(score))
                        if score is not None:
                            parent.outcomes[job.name] = _outcome(score)
            scored = [trial for trial in study.trials if trial.value is not None]
            if not scored:
                return max(code, 1)
            best = max(scored, key=lambda trial: (trial.value, -trial.number))
            command = ["python", "src/train.py", *space.job(best.params).overrides]
            print(
                f"\nBest of {len(study.trials)} trials: {kind} accuracy {best.value:.2f} % on validation rows, "
                f"in trial {best.number + 1}:\n  {shlex.join(command)}"
            )
        return code

    def _judged_by(self, plan: Plan) -> str:
        """The kind of model whose accuracy counts."""
        if plan.settings.dry_run:
            raise UserError(
                "hydra/sweeper=search cannot tell its jobs before they run: leave out dry_run=true."
            )
        if not plan.dataset.val_fraction:
            raise UserError(
                "hydra/sweeper=search chooses by validation rows, and there are none: set dataset.val_fraction=0.2."
            )
        kind = self.kind or next(kind for kind in MAIN_KINDS if kind in plan.method.kinds)
        check_choice("hydra.sweeper.kind", kind, plan.method.kinds)
        return kind

    def _study(self, folder: Path, distributions: Mapping[str, Any], judged_by: str) -> Any:
        """Optuna's study in the folder's journal. Another question, such as other ranges, is another study there."""
        import optuna
        from optuna.distributions import distribution_to_json
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder.mkdir(parents=True, exist_ok=True)
        ranges = {key: distribution_to_json(distribution) for key, distribution in distributions.items()}
        question = json.dumps([judged_by, self.seed, ranges])
        return optuna.create_study(
            study_name=hashlib.sha256(question.encode()).hexdigest(),
            storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL))),
            direction="maximize",
            load_if_exists=True,
        )

    def _next(self, study: Any, distributions: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """The values of the next trials by number: a batch that was broken off, else a new one; none at the end.

        Batches begin at multiples of `at_once`. A trial is seeded by its number, so it draws the same whether or not
        the search was broken off before it.
        """
        import optuna
        from optuna.trial import TrialState, create_trial

        values = {trial.number: trial.params for trial in study.get_trials(states=[TrialState.RUNNING])}
        known = len(study.trials)
        batches = math.ceil(known / self.at_once) if values else known // self.at_once + 1
        # Drawn apart: `study.ask` writes to the journal value by value, and a kill would leave half a trial there.
        apart = optuna.create_study(direction="maximize")
        apart.add_trials(study.trials)
        for number in range(known, min(self.trials, batches * self.at_once)):
            seed = int(numpy_generator(self.seed, "search", number).integers(2**31))
            apart.sampler = optuna.samplers.TPESampler(seed=seed)
            drawn = apart.ask(dict(distributions)).params
            values[number] = {key: _short(value, distributions[key]) for key, value in drawn.items()}
            study.add_trial(
                create_trial(
                    state=TrialState.RUNNING, params=values[number], distributions=dict(distributions)
                )
            )
        return values


def validation_score(folder: Path, kind: str) -> float | None:
    """A finished run's main score on validation rows, of its last tested rounds, an error as its negative: the
    highest is best. None where there is none."""
    if not (folder / "summary.json").exists():
        return None
    summary = json.loads((folder / "summary.json").read_text())
    metric = VALIDATION + main_metric(summary)
    column, sign = score(metric, kind), -1 if is_error(summary, metric) else 1
    with (folder / "rounds.csv").open(newline="") as file:
        scores = [sign * float(row[column]) for row in csv.DictReader(file) if row.get(column)]
    rounds = OmegaConf.load(folder / "config.yaml").eval.final_rounds
    return fmean(scores[-rounds:]) if scores else None


def _any(distribution: Any) -> Any:
    return distribution.choices[0] if hasattr(distribution, "choices") else distribution.low


def _outcome(score: float | None) -> str:
    return "failed" if score is None else f"{score:.2f} % on validation rows"


def _state(score: float | None) -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL if score is None else TrialState.COMPLETE
