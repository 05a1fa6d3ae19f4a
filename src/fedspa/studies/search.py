"""A search for good settings with Optuna: the next jobs follow from the results of the earlier ones.

Settings are judged by validation rows alone: no client trains on them, and they are no test rows. A trial is a job of
a study. Started again, the search draws the same trials again, and the study skips those that are finished.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep

from fedspa.config.plan import Plan, check
from fedspa.config.recorded import recorded_config
from fedspa.core import names
from fedspa.core.errors import UserError, brief, check_choice
from fedspa.core.file_names import file_name
from fedspa.core.limits import Limited, limited
from fedspa.core.randomness import numpy_generator
from fedspa.core.records import MAIN_KINDS, VALIDATION
from fedspa.costs.units import show_count
from fedspa.studies.jobs import LONGEST_STUDY, Job, Study, by_key, is_neutral, numbers_of
from fedspa.studies.progress import Progress
from fedspa.studies.sweep import Sweeps, finished, only_one
from fedspa.tracking.sweep_run import nested_in
from fedspa.tracking.tables import read_table


@dataclass(frozen=True)
class Space:
    """The settings that a search varies, and those that it fixes."""

    varied: Mapping[str, Override]
    fixed: tuple[str, ...]
    name: str
    """The name of the study: the varied settings, and the fixed ones that decide results."""

    @classmethod
    def of(cls, params: Mapping[str, str], arguments: Sequence[str], parser: OverridesParser) -> Space:
        """The space of a file (`params`) and the command line, which wins. Raises `UserError` for an empty space."""
        given = by_key(
            parser.parse_overrides([*(f"{key}={values}" for key, values in params.items()), *arguments])
        )
        varied = {key: override for key, override in sorted(given.items()) if override.is_sweep_override()}
        if not varied:
            raise UserError(
                "hydra/sweeper=search has nothing to vary: give a space such as training.lr=interval(0.01,0.5)."
            )
        fixed = {key: override.input_line or "" for key, override in given.items() if key not in varied}
        decisive = sorted(text for key, text in fixed.items() if key == "sweep" or not is_neutral(key))
        name = file_name(["search", "+".join(varied), *decisive], LONGEST_STUDY)
        return cls(varied, tuple(fixed.values()), name)

    def distributions(self) -> dict[str, Any]:
        """Optuna's distribution of each varied setting. Raises `UserError` for a range without values."""
        return {key: _distribution(override) for key, override in self.varied.items()}

    def job(self, values: Mapping[str, Any]) -> Job:
        """The job of a trial with these values."""
        settings = tuple(f"{key}={value}" for key, value in sorted(values.items()))
        return Job(settings, (*self.fixed, *settings))


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
        whole = isinstance(numbers[0], int)
        kind: Any = distributions.IntDistribution if whole else distributions.FloatDistribution
        return kind(min(numbers), max(numbers), log, abs(type(numbers[0])(sweep.step)))
    except (ValueError, ArithmeticError) as error:
        raise UserError(f"{override.input_line} cannot be searched: {brief(error)}.") from error


def _short(value: Any, distribution: Any) -> Any:
    """A drawn value in few digits, since it stands in names and commands: four, or those of its range."""
    if not isinstance(value, float):
        return value
    rounded = float(f"{value:.12g}" if distribution.step else f"{value:.4g}")
    return min(max(rounded, distribution.low), distribution.high)


@dataclass
class Search(Limited):
    """The options of conf/hydra/sweeper/search.yaml."""

    section: ClassVar[str] = "hydra.sweeper"
    trials: int = limited(low=1)
    at_once: int = limited(low=1)
    seed: int = limited(low=0)
    kind: str | None = limited(choices=MAIN_KINDS)

    def __post_init__(self) -> None:
        if find_spec("optuna") is None:
            raise UserError("hydra/sweeper=search needs Optuna: pip install 'fedspa[optuna]'.")
        super().__post_init__()

    def run(self, space: Space, sweeps: Sweeps) -> int:
        """Run the trials that are not finished, and print the best. Returns the highest exit code of any.

        Raises `UserError` if there are no validation rows.
        """
        import optuna
        from optuna.trial import TrialState

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        distributions, code = space.distributions(), 0
        example = {key: getattr(d, "choices", [getattr(d, "low", 0)])[0] for key, d in distributions.items()}
        plan = check(sweeps.compose(space.job(example).overrides))
        kind, folder = self._judged_by(plan), sweeps.root / space.name
        metric, rising = plan.main_metric, plan.metrics[plan.main_metric].higher_is_better
        seed = int(numpy_generator(self.seed, "search").integers(2**31))
        study = optuna.create_study(
            direction="maximize" if rising else "minimize", sampler=optuna.samplers.TPESampler(seed=seed)
        )

        def job_of(trial: Any) -> Job:
            return space.job({key: _short(value, distributions[key]) for key, value in trial.params.items()})

        print(f"{space.name}: {show_count(self.trials, 'trial')}, in {folder}", flush=True)
        progress = Progress(self.trials)
        with only_one(sweeps.root, space.name), nested_in(space.name, plan.loggers) as parent:
            for first in range(0, self.trials, self.at_once):
                batch = [study.ask(distributions) for _ in range(min(self.at_once, self.trials - first))]
                once = tuple(dict.fromkeys(map(job_of, batch)))  # two trials may be the same job
                progress.skip(len(batch) - len(once))
                jobs = sweeps.planned(Study(space.name, once))
                failures = sweeps.run_missing(jobs, finished(jobs), parent, progress)
                code = max([code, *(failure.code for failure in failures.values())])
                for trial in batch:
                    name = job_of(trial).name
                    score, parent.outcomes[name] = validation_score(folder / name, kind)
                    study.tell(trial, score, TrialState.FAIL if score is None else TrialState.COMPLETE)
        if not study.get_trials(states=[TrialState.COMPLETE]):
            return max(code, 1)
        job = job_of(study.best_trial)
        _, words = validation_score(folder / job.name, kind)
        trials = show_count(self.trials, "trial")
        print(
            f"\nBest of {trials}: {kind} {metric} {words}, in trial {study.best_trial.number + 1}:\n"
            f"  {shlex.join(['python', 'src/train.py', *job.overrides])}"
        )
        return code

    def _judged_by(self, plan: Plan) -> str:
        """The kind of model whose score counts."""
        if plan.settings.dry_run:
            raise UserError("hydra/sweeper=search draws its jobs while it runs: leave out dry_run=true.")
        if not plan.dataset.val_fraction:
            raise UserError(
                "hydra/sweeper=search chooses by validation rows, and there are none: set dataset.val_fraction=0.2."
            )
        kind = self.kind or next(kind for kind in MAIN_KINDS if kind in plan.method.kinds)
        check_choice("hydra.sweeper.kind", kind, plan.method.kinds)
        return kind


def validation_score(folder: Path, kind: str) -> tuple[float | None, str]:
    """A run's main score on validation rows, of its last tested rounds, also in words. None if it failed."""
    if not (folder / "summary.json").exists():
        return None, "failed"
    summary = json.loads((folder / "summary.json").read_text())
    column, unit = names.score(VALIDATION + names.main_metric(summary), kind), names.unit(summary)
    scores = [score for score in read_table(folder / "rounds.csv").get(column, ()) if score == score]
    if not scores:
        return None, "no score"
    mean = fmean(scores[-recorded_config(folder / "config.yaml")["eval"]["final_rounds"] :])
    return mean, f"{names.shown(mean, unit)}{unit} on validation rows"
