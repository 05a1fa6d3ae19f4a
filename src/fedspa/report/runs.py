"""Reading finished runs: their folders, or the tracking store, whose artifacts are the same files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedspa.core.errors import UserError, brief
from fedspa.core.names import final_scores, score
from fedspa.core.paths import SET_ASIDE
from fedspa.core.records import KINDS, MEAN_OVER, VALIDATION
from fedspa.tracking.page import flat_params
from fedspa.tracking.run_folder import RunFiles, Unreadable
from fedspa.tracking.store import is_missing, open_client, store_uri
from fedspa.tracking.sweep_run import SWEEP


@dataclass(frozen=True, eq=False)
class Run(RunFiles):
    """A finished run, with what reports ask of it."""

    @cached_property
    def settings(self) -> dict[str, str]:
        """The config, flat: values by dotted key, as one would type them."""
        settings = flat_params(self.config)
        for key in (
            "model._target_",
            "model.name",
        ):  # two networks of one name differ in a path of code alone
            settings.pop(key, None)
        return settings | {"model": self.summary["model"]}  # such as resnet18, timm:resnet18

    @property
    def seed(self) -> int:
        return int(self.summary["seed"])

    @property
    def limit(self) -> int:
        """Its number of rounds."""
        return int(self.summary["rounds"])

    @property
    def metrics(self) -> list[str]:
        """The names of its scores on test rows, the main one first: the one that curves and targets are about."""
        return [metric for metric in self.summary["metrics"] if not metric.startswith(VALIDATION)]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of model that it tested at its end, in the order of `KINDS`."""
        return tuple(kind for kind in KINDS if kind in self.scores(self.metrics[0]))

    @property
    def mean_over(self) -> str:
        """The weights of its means over clients, in words."""
        return MEAN_OVER[self.settings.get("eval.weighting", "clients")]

    @property
    def in_percent(self) -> bool:
        """True if its scores are percentages; those of a regression are not."""
        return bool(self.summary.get("in_percent", True))

    def lower_is_better(self, metric: str) -> bool:
        return metric in self.summary.get("lower_is_better", ())

    def scores(self, metric: str) -> dict[str, dict[str, float]]:
        """Its final scores by that metric: how each kind of model that it has is spread over clients."""
        return final_scores(self.summary).get(metric, {})

    def curve(self, kind: str) -> pd.Series:
        """The mean of the main metric over clients, by the rounds in which models of that kind were tested."""
        if (column := score(self.metrics[0], kind)) not in self.rounds:
            return pd.Series(dtype=float)
        return self.rounds.set_index("round")[column].dropna()

    @cached_property
    def label_counts(self) -> np.ndarray | None:
        """int64 [clients, classes]: training images; None where the run has too many clients to keep them."""
        names = sorted((name for name in self.clients if name.startswith("label_")), key=lambda n: int(n[6:]))
        return self.clients[names].to_numpy() if names else None

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


@dataclass(frozen=True)
class Found:
    """Runs, and what was left out: (where, why)."""

    runs: list[Run]
    left_out: list[tuple[str, str]]


def read_runs(folders: Mapping[str, Path | UserError]) -> Found:
    """Read the runs of these folders, by name; of a run without one the error says why.

    Raises `UserError` where not one can be read.
    """
    runs: list[Run] = []
    left_out: list[tuple[str, str]] = []
    for name, folder in folders.items():
        if isinstance(folder, UserError):
            left_out.append((name, str(folder)))
            continue
        try:
            runs.append(Run.read(folder, name))
        except Unreadable as error:
            left_out.append((name, str(error)))
    if not runs:
        where, why = left_out[0]
        raise UserError(f"None of the {len(left_out)} runs found can be reported: {where}: {why}.")
    return Found(runs, left_out)


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

    uri = store_uri()
    if is_missing(uri):
        raise UserError(f"runs={condition}: there is no such folder, and no tracking store at {uri}.")
    client = open_client(uri)
    try:
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        runs: list[Any] = []
        page: str | None = None
        while page != "":
            part = client.search_runs(experiments, condition, order_by=["start_time"], page_token=page)
            runs, page = [*runs, *part], part.token or ""
    except MlflowException as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"runs={condition} is neither a folder nor a filter of MLflow: {reason}.") from error
    folders = {
        f"{run.info.run_name} ({run.info.run_id[:8]})": _artifacts(client, uri, run)
        for run in runs
        if SWEEP not in run.data.tags
    }
    if not folders:
        raise UserError(f"runs={condition} finds no run in the tracking store {uri}.")
    return folders


def _artifacts(client: Any, uri: str, run: Any) -> Path | UserError:
    """The folder of a stored run's files, downloaded where they are not local; an error where there are none."""
    from mlflow.artifacts import download_artifacts

    try:
        if client.list_artifacts(run.info.run_id):
            return Path(download_artifacts(run_id=run.info.run_id, tracking_uri=uri))
        reason = "nothing is there"
    except Exception as error:  # of any of MLflow's kinds of artifact stores
        reason = brief(error).rstrip(".")
    status = "" if run.info.status == "FINISHED" else f", and it is {run.info.status}"
    return UserError(f"its files are not in {run.info.artifact_uri} ({reason}){status}")
