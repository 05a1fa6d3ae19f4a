"""The numbers of a cell: one of each seed. Standard deviations have ddof = 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedspa.core.names import score
from fedspa.report.runs import Run


@dataclass(frozen=True)
class Seeds:
    """One number of each seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def std(self) -> float:
        """The standard deviation of the population, as in the paper."""
        return float(np.std(self.values))


@dataclass(frozen=True)
class Race:
    """The first round in which each seed reached an accuracy; None where a seed never did."""

    rounds: tuple[int | None, ...]
    limit: int
    """The number of rounds of the runs."""

    @property
    def reached(self) -> int:
        """The number of seeds that reached the accuracy."""
        return sum(round is not None for round in self.rounds)

    @property
    def seeds(self) -> Seeds | None:
        """The rounds; None unless every seed reached the accuracy."""
        known = tuple(float(round) for round in self.rounds if round is not None)
        return Seeds(known) if len(known) == len(self.rounds) else None


@dataclass(frozen=True)
class RivalRace:
    """The rounds to a rival's best accuracy, seed by seed."""

    race: Race
    rival_rounds: Seeds
    """The round in which the rival itself first had its best accuracy."""

    @property
    def change(self) -> float | None:
        """Mean rounds against the rival's, in percent: -76 is 76 % fewer. None unless every seed got there."""
        rounds = self.race.seeds
        return 100 * (rounds.mean / self.rival_rounds.mean - 1) if rounds else None


def final_score(runs: Sequence[Run], kind: str, metric: str) -> Seeds | None:
    """The mean score over clients at the end of each seed's run; None where a run lacks that kind of model."""
    return of_runs(runs, lambda run: run.scores(metric).get(kind, {}).get("mean"))


def of_summary(runs: Sequence[Run], name: str) -> Seeds | None:
    """A number of the summaries; None where a run does not have it."""
    return of_runs(runs, lambda run: run.summary.get(name))


def of_runs(runs: Sequence[Run], value: Callable[[Run], float | None]) -> Seeds | None:
    """A number of each run; None without runs, or where a run does not have it."""
    values = [found for run in runs if (found := value(run)) is not None]
    return Seeds(tuple(map(float, values))) if values and len(values) == len(runs) else None


def seconds_per_update(runs: Sequence[Run], phase: str) -> Seeds | None:
    """Mean wall-clock seconds of a phase (train, search) in one client update; None where it is not known."""
    column = f"time/{phase}_s"

    def of(run: Run) -> float | None:
        if column not in run.timing:
            return None
        return float(run.timing[column].sum() / run.rounds["train/participants"].sum())

    return of_runs(runs, of)


def race(runs: Sequence[Run], kind: str, accuracy: float) -> Race | None:
    """The rounds to an accuracy, or another main metric; None where a run has no curve of that kind."""
    if not runs or any(not len(run.curve(kind)) for run in runs):
        return None
    return Race(tuple(first_round(run, kind, accuracy) for run in runs), max(run.limit for run in runs))


def first_round(run: Run, kind: str, goal: float) -> int | None:
    """The first round in which that kind of model was at least as good as the goal in the main metric."""
    curve = run.curve(kind)
    reached = curve.index[(curve <= goal) if run.lower_is_better(run.metrics[0]) else (curve >= goal)]
    return int(reached[0]) if len(reached) else None


def best(run: Run, kind: str) -> tuple[float, int]:
    """The best mean of the main metric in any round, and the round. Others race to it; it is no result."""
    curve = run.curve(kind)
    at = curve.idxmin() if run.lower_is_better(run.metrics[0]) else curve.idxmax()
    return float(curve[at]), int(at)


def rival_race(runs: Sequence[Run], kind: str, rivals: Sequence[Run], rival_kind: str) -> RivalRace | None:
    """The rounds to the best accuracy of the rival's run with the same seed; None where no seed has both."""
    goals = {rival.seed: best(rival, rival_kind) for rival in rivals if len(rival.curve(rival_kind))}
    racers = [run for run in runs if run.seed in goals and len(run.curve(kind))]
    if not racers:
        return None
    rounds = tuple(first_round(run, kind, goals[run.seed][0]) for run in racers)
    theirs = tuple(float(goals[run.seed][1]) for run in racers)
    return RivalRace(Race(rounds, max(run.limit for run in racers)), Seeds(theirs))


def curves(runs: Sequence[Run], kind: str) -> pd.DataFrame:
    """The mean of the main metric by round (rows) and seed (columns), of the rounds that every seed tested."""
    return pd.concat({run.seed: run.curve(kind) for run in runs}, axis=1).dropna()


def client_scores(runs: Sequence[Run], kind: str) -> np.ndarray:
    """float64 [clients of all seeds]: the main metric of the clients that have such a model."""
    known = [
        run.clients[column].dropna() for run in runs if (column := score(run.metrics[0], kind)) in run.clients
    ]
    return pd.concat(known).to_numpy() if known else np.array([])
