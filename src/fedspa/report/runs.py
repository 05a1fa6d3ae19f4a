"""Reading finished runs: their folders, or the tracking store, whose artifacts are the same files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedspa.config.recorded import settings_today
from fedspa.core import names
from fedspa.core.components import known_class
from fedspa.core.errors import UserError, written
from fedspa.core.paths import SET_ASIDE
from fedspa.core.records import KINDS, VALIDATION
from fedspa.core.roles import Role, role_of
from fedspa.tracking.artifacts import artifacts, client_to_read
from fedspa.tracking.run_folder import RunFiles, Unreadable
from fedspa.tracking.sweep_run import SWEEP

MOST_RUNS = 50_000
"""The number of runs that MLflow finds at once."""


@dataclass(frozen=True, eq=False)
class Run(RunFiles):
    """A finished run, with the values that reports need."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings by the names that a user types: training.lr, and of a group its choice, as method.

        Settings that change nothing in a run's files are left out. Settings that an older version lacked have defaults.
        """
        found: dict[str, Any] = {}
        for key, value in settings_today(self.config).items():
            group, _, last = key.rpartition(".")
            if last == "_target_" or role_of(key) is Role.NEITHER:
                continue
            found[group if last == "name" else key] = written(value) if isinstance(value, list) else value
        return found | {"model": self.summary["model"]}  # with its library: timm:resnet18

    @cached_property
    def starts_dense(self) -> bool:
        """`Method.starts_dense` of its method; False if the class is not one of fedspa or a plug-in here."""
        kind = known_class("method", self.config.get("method", {}).get("_target_"))
        return kind is not None and kind.starts_dense

    @property
    def seed(self) -> int:
        return int(self.summary["seed"])

    @property
    def limit(self) -> int:
        """The number of rounds."""
        return int(self.summary["rounds"])

    @property
    def metrics(self) -> list[str]:
        """The names of the scores on test rows. Curves and targets are about the first one, the main metric."""
        return [metric for metric in self.summary["metrics"] if not metric.startswith(VALIDATION)]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of model that were tested at the end, in the order of `KINDS`."""
        return tuple(kind for kind in KINDS if kind in self.scores(self.metrics[0]))

    def scores(self, metric: str) -> dict[str, dict[str, float]]:
        """The final scores by kind of model: statistics over the clients."""
        return names.final_scores(self.summary).get(metric, {})

    def score(self, metric: str, kind: str, statistic: str = "mean") -> float | None:
        """A statistic of a final score over the clients; None if there is no such model."""
        return self.scores(metric).get(kind, {}).get(statistic)

    def curve(self, kind: str) -> pd.Series:
        """The mean of the main metric over clients, by the rounds in which models of that kind were tested."""
        if (column := names.score(self.metrics[0], kind)) not in self.rounds:
            return pd.Series(dtype=float)
        return self.rounds.set_index("round")[column].dropna()

    def first_round(self, kind: str, goal: float) -> float | None:
        """The first round in which that kind of model was at least as good as the goal in the main metric.

        Infinity if it never was; None if the run has no curve of that kind.
        """
        if not len(curve := self.curve(kind)):
            return None
        reached = curve.index[curve <= goal if self._falls else curve >= goal]
        return float(reached[0]) if len(reached) else math.inf

    def best(self, kind: str) -> tuple[float, int] | None:
        """The best mean of the main metric in any round, and the round: a goal for others, and no result."""
        if not len(curve := self.curve(kind)):
            return None
        at = curve.idxmin() if self._falls else curve.idxmax()
        return float(curve[at]), int(at)

    @property
    def _falls(self) -> bool:
        """True if the main metric is an error."""
        return names.is_error(self.summary, self.metrics[0])

    def seconds_per_update(self, phase: str) -> float | None:
        """Mean wall-clock seconds of a phase (train, search) in one client update; None if it has none."""
        seconds = self.timing.get(f"time/{phase}_s", pd.Series(dtype=float)).sum()
        return float(seconds / self.rounds["train/participants"].sum()) or None

    @property
    def samples_per_update(self) -> float:
        """Mean samples that a client update trained on, once for each epoch."""
        return float(self.rounds["train/samples"].sum() / self.rounds["train/participants"].sum())

    @cached_property
    def label_counts(self) -> np.ndarray | None:
        """int64 [clients, classes]: training images; None if the run has too many clients to keep them."""
        labels = sorted(
            (name for name in self.clients if name.startswith("label_")), key=lambda n: int(n[6:])
        )
        return self.clients[labels].to_numpy() if labels else None

    @cached_property
    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of each parameter tensor, in the order of the masks' bits; empty for an older run."""
        path = self.folder / "tensors.csv"
        if not path.is_file():
            return []
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        shapes = (tuple(int(side) for side in shape.split("x") if side) for shape in table["shape"])
        return list(zip(table["tensor"], shapes, strict=True))

    @property
    def has_masks(self) -> bool:
        return (self.folder / "masks.safetensors").is_file() and bool(self.tensors)

    def masks(self) -> tuple[list[int], np.ndarray]:
        """The clients that have a mask, and their masks: uint8 [clients, bytes], a bit a parameter."""
        from safetensors.numpy import load_file

        masks = {int(client): bits for client, bits in load_file(self.folder / "masks.safetensors").items()}
        clients = sorted(masks)
        return clients, np.stack([masks[client] for client in clients])


def varied(runs: Sequence[Run]) -> list[str]:
    """The names of the settings that have several values among the runs that have them."""
    values: dict[str, set[Any]] = {}
    for run in runs:
        for name, value in run.settings.items():
            values.setdefault(name, set()).add(value)
    return [name for name, several in values.items() if len(several) > 1]


@dataclass(frozen=True)
class Found:
    """Runs, and those that were left out: (where, why)."""

    runs: list[Run]
    left_out: list[tuple[str, str]]


def read_runs(folders: Mapping[str, Path | UserError]) -> Found:
    """Read the runs of these folders, by name; of a run without one the error says why.

    Raises `UserError` where not one can be read.
    """
    found = Found([], [])
    for name, folder in folders.items():
        try:
            if isinstance(folder, UserError):
                raise folder
            found.runs.append(Run.read(folder, name))
        except (UserError, Unreadable) as error:
            found.left_out.append((name, str(error)))
    if not found.runs:
        where, why = found.left_out[0]
        raise UserError(f"None of the {len(found.left_out)} runs found can be reported: {where}: {why}.")
    return found


def folders_under(root: Path) -> dict[str, Path]:
    """Every run's folder at or below `root`, by its path from there; but none that a sweep has set aside.

    Raises `UserError` where there is none.
    """
    found = {
        os.path.relpath(folder, root) if Path(folder) != root else root.name: Path(folder)
        for folder, _, files in sorted(os.walk(root))
        if ("config.yaml" in files or "summary.json" in files) and SET_ASIDE not in Path(folder).parts
    }
    if not found:
        raise UserError(
            f"{root} holds no run: a run's folder has a config.yaml and, once finished, a summary.json."
        )
    return found


def folders_in_store(condition: str) -> dict[str, Path | UserError]:
    """The artifacts of the tracking store's runs that meet MLflow's filter, oldest first, or why they are gone.

    The runs that stand for a whole sweep have none, and are not among them. Raises `UserError` where the filter cannot
    be read or meets none.
    """
    from mlflow.exceptions import MlflowException

    client = client_to_read(f"runs={condition}")
    try:
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        runs = client.search_runs(experiments, condition, max_results=MOST_RUNS, order_by=["start_time"])
    except MlflowException as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"runs={condition} is neither a folder nor a filter of MLflow: {reason}.") from error
    folders: dict[str, Path | UserError] = {}
    for run in runs:
        if SWEEP not in run.data.tags:
            name = f"{run.info.run_name} ({run.info.run_id[:8]})"
            try:
                folders[name] = artifacts(client, run.info.run_id)
            except UserError as error:
                folders[name] = error
    if not folders:
        raise UserError(f"runs={condition} finds no run in the tracking store.")
    return folders
