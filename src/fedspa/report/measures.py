"""Numbers of a cell: its runs' results over seeds. Accuracies in percent, standard deviations with ddof = 0."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedspa.core.records import ACCURACY
from fedspa.report.runs import Run

RIVALS = (("fedavg", "global"), ("fedavg", "local"), ("ditto", "personal"))
"""Whose best accuracy the others race to. The paper's are FedAvg's global and Ditto's personal model; FedAvg's local
model is the fair rival of any local model."""


@dataclass(frozen=True)
class OverSeeds:
    """One number of each seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def std(self) -> float:
        """Of the population, as the paper's."""
        return float(np.std(self.values))


@dataclass(frozen=True)
class Race:
    """The first round in which each seed reached an accuracy; None where it never did."""

    rounds: tuple[int | None, ...]
    limit: int
    """How many rounds the runs had."""

    @cached_property
    def reached(self) -> int:
        """How many seeds got there."""
        return sum(round is not None for round in self.rounds)

    @property
    def over_seeds(self) -> OverSeeds | None:
        """None unless every seed got there."""
        known = tuple(float(round) for round in self.rounds if round is not None)
        return OverSeeds(known) if len(known) == len(self.rounds) else None


@dataclass(frozen=True)
class RivalRace:
    """How fast runs reach a rival's best accuracy, seed by seed."""

    race: Race
    rival_rounds: OverSeeds
    """When the rival itself first had its best."""

    @property
    def change(self) -> float | None:
        """Mean rounds against the rival's, in percent: -76 is 76 % fewer. None unless every seed got there."""
        own = self.race.over_seeds
        return 100 * (own.mean / self.rival_rounds.mean - 1) if own else None


def final_accuracy(runs: list[Run], kind: str) -> OverSeeds | None:
    """Mean accuracy over clients at the end, of each seed's run; None where a run lacks that kind of model."""
    return final_score(runs, kind, ACCURACY)


def final_score(runs: list[Run], kind: str, metric: str) -> OverSeeds | None:
    """The same by any metric."""
    means = [spread["mean"] for run in runs if (spread := run.scores(metric)[kind])]
    return OverSeeds(tuple(means)) if means and len(means) == len(runs) else None


def tested_clients(runs: list[Run], kind: str) -> tuple[int, int]:
    """How many clients the final accuracy is over (the fewest of any seed), and how many there are."""
    return min(int(run.summary["accuracy"][kind]["clients"]) for run in runs), int(runs[0].summary["clients"])


def density(runs: list[Run]) -> OverSeeds | None:
    """The measured mean density over the visited clients; None where a run does not say it."""
    if not runs or any("mean" not in run.summary.get("density", {}) for run in runs):
        return None
    return OverSeeds(tuple(run.summary["density"]["mean"] for run in runs))


def traffic(runs: list[Run]) -> OverSeeds:
    """Bytes of a whole run, masks included."""
    return OverSeeds(tuple(float(run.summary["traffic_bytes"]["total"]) for run in runs))


def value_traffic(runs: list[Run]) -> OverSeeds:
    """Bytes of weights and updates alone, as the paper counts."""
    counts = [run.summary["traffic_bytes"] for run in runs]
    return OverSeeds(tuple(float(count["down"] + count["up"]) for count in counts))


def encoded_traffic(runs: list[Run]) -> OverSeeds | None:
    """Bytes that really passed through the wire format; None where a run did not use it (`federation.wire`)."""
    counts = [run.summary["traffic_bytes"].get("encoded") for run in runs]
    return None if None in counts else OverSeeds(tuple(float(count) for count in counts))


def flops(runs: list[Run]) -> OverSeeds | None:
    """FLOPs of a whole run, mask search included; None where a run's model has layers that cannot be counted."""
    counts = [run.summary["flops"]["total"] for run in runs]
    return None if None in counts else OverSeeds(tuple(float(count) for count in counts))


def finetune_flops(runs: list[Run]) -> OverSeeds | None:
    """FLOPs of the final fine-tuning, which come on top of a run's; None where there was none or it is not known."""
    counts = [run.summary["flops"].get("finetune") for run in runs]
    return OverSeeds(tuple(float(count) for count in counts if count)) if runs and all(counts) else None


def first_round(run: Run, kind: str, accuracy: float) -> int | None:
    """The first round in which that kind of model had at least that accuracy."""
    rounds, reached = run.curve(kind)
    there = rounds[reached >= accuracy]
    return int(there[0]) if len(there) else None


def race(runs: list[Run], kind: str, accuracy: float) -> Race | None:
    """The rounds to an accuracy; None where a run has no curve of that kind."""
    if not runs or any(not len(run.curve(kind)[0]) for run in runs):
        return None
    return Race(tuple(first_round(run, kind, accuracy) for run in runs), max(run.limit for run in runs))


def best(run: Run, kind: str) -> tuple[float, int]:
    """The highest mean accuracy of any round, and the round: what others may race to, never a result."""
    rounds, accuracy = run.curve(kind)
    return float(accuracy.max()), int(rounds[accuracy.argmax()])


def rival_race(runs: list[Run], kind: str, rivals: list[Run], rival_kind: str) -> RivalRace | None:
    """The rounds to the best accuracy of the rival's run with the same seed; None where no seed has both."""
    goals = {rival.seed: best(rival, rival_kind) for rival in rivals if len(rival.curve(rival_kind)[0])}
    racers = [run for run in runs if run.seed in goals and len(run.curve(kind)[0])]
    if not racers:
        return None
    own = tuple(first_round(run, kind, goals[run.seed][0]) for run in racers)
    theirs = tuple(float(goals[run.seed][1]) for run in racers)
    return RivalRace(Race(own, max(run.limit for run in racers)), OverSeeds(theirs))


def seconds_a_visit(runs: list[Run], phase: str) -> OverSeeds | None:
    """Mean wall-clock seconds of a phase (train, search) in one visit to one client; None where it is not known."""
    if not runs or any(f"{phase}_s" not in run.timing for run in runs):
        return None
    seconds = [np.nansum(run.timing[f"{phase}_s"]) / run.rounds["participants"].sum() for run in runs]
    return OverSeeds(tuple(float(value) for value in seconds))


def curve_over_seeds(runs: list[Run], kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounds that every seed tested, and mean and standard deviation over seeds of the accuracy in them."""
    curves = [dict(zip(*run.curve(kind), strict=True)) for run in runs]
    rounds = np.array(sorted(set.intersection(*(set(curve) for curve in curves))))
    values = np.array([[curve[round] for round in rounds] for curve in curves])
    return rounds, values.mean(axis=0), values.std(axis=0)
