"""A run in MLflow: a mirror of the run's folder, which is the truth.

The run writes into its folder what it is (`mlflow.json`), its tables and its results. `Mirror.sync` sends what the
store lacks: in a thread during the run and at its end, and by hand (`python src/sync.py <folder>`). It may be called at
any moment and any number of times. It notes in the folder the last round that the store has confirmed, and asks the
store before it sends anything again. No failure of the store touches a run that has begun.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspa.config.recorded import recorded_config
from fedspa.core.errors import UserError
from fedspa.core.files import write_whole
from fedspa.core.names import final_metrics
from fedspa.tracking.page import NOTE, described, flat_params
from fedspa.tracking.run_folder import RoundReader
from fedspa.tracking.store import default_uri, is_missing, open_store, root_cause, run_page

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

ABOUT, CONFIRMED = "mlflow.json", ".mlflow_confirmed.json"
"""Files of the run's folder: what the run is and how it ended; how far the store has it."""
START, ENDED_BECAUSE = "start", "ended_because"
"""Tags: by the first a run is found that was created and not noted; the second says why a run ended early."""
SMALL_FILES = ("*.yaml", "*.csv", "*.json", "*.png")


class Mirror:
    """Brings one run's folder to its tracking store."""

    def __init__(self, folder: Path, uri: str = "") -> None:
        """`uri`: the store; "" for that of MLFLOW_TRACKING_URI, else the one that the folder names."""
        self._uri, self._folder, self._rounds = uri, folder, RoundReader(folder)
        self._waiting: list[tuple[int, float, dict[str, float]]] = []
        self._client: MlflowClient | None = None

    @property
    def about(self) -> dict[str, Any]:
        """The run's description of itself. Raises `UserError` where the folder has none."""
        try:
            found: dict[str, Any] = json.loads((self._folder / ABOUT).read_text())
            return {"store": found["store"] or "", "start": found["start"], **found}
        except FileNotFoundError:
            if not self._folder.is_dir():
                raise UserError(f"{self._folder} is no folder.") from None
            raise UserError(f"{self._folder} has no {ABOUT}: its run was not tracked by MLflow.") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self._folder / ABOUT} is damaged: {error}.") from error

    @property
    def uri(self) -> str:
        """The store that is named now, by `uri` or MLFLOW_TRACKING_URI; else the store that the folder names.

        If neither is there, the project's own.
        """
        noted = self.about["store"]
        named = self._uri or os.environ.get("MLFLOW_TRACKING_URI")
        return named or (noted if noted and not is_missing(noted) else default_uri())

    @property
    def confirmed(self) -> dict[str, Any]:
        """The run's id in the store, its last confirmed round, and the end that the store has; empty at first."""
        try:
            found: dict[str, Any] = json.loads((self._folder / CONFIRMED).read_text())
            return found
        except (OSError, ValueError):
            return {}

    @property
    def page(self) -> str:
        """The run's page, as the end of an address."""
        return run_page(self._experiment, self.confirmed["run_id"])

    def sync(self) -> None:
        """Send all that the store lacks. Raises `UserError`, and the errors of MLflow, its databases and the disk."""
        from filelock import FileLock

        with FileLock(self._folder / ".mlflow.lock"):
            about = self.about
            if self._client is None:
                if self.confirmed and is_missing(self.uri):
                    raise UserError(
                        f"There is no tracking store at {self.uri} to go on in: name the one that has the run by "
                        "MLFLOW_TRACKING_URI=... or loggers.mlflow.tracking_uri=..., or go on with logger=csv."
                    )
                self._client, self._experiment = open_store(self.uri, about["experiment"])
            if about["status"] != "RUNNING" and self.confirmed.get("end") == about["end"]:
                return
            run = self._run(self._client, about)
            reached = {metric.key: metric.step for metric in run.data.to_proto().metrics}
            start = run.info.start_time or 0
            self._send_rounds(self._client, run.info.run_id, start, reached, about.get("scores", []))
            if about["status"] != "RUNNING":
                self._end(self._client, run.info.run_id, about, reached)
                self._confirm(end=about["end"])

    def _run(self, client: MlflowClient, about: dict[str, Any]) -> Run:
        """The run in the store, found or created, open while it goes on, with its data set and params."""
        from mlflow.exceptions import MlflowException

        run_id = self.confirmed.get("run_id")
        if run_id is None:
            found = client.search_runs(
                [self._experiment], f"tags.{START} = '{about['start']}'", max_results=1
            )
            run = found[0] if found else client.create_run(
                self._experiment, run_name=about["name"], tags={**about["tags"], START: about["start"]}
            )  # fmt: skip
            self._confirm(run_id=run.info.run_id, round=0)
        else:
            try:
                run = client.get_run(run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                raise UserError(
                    f"The tracking store {self.uri} has no run {run_id}: {self._folder} began it in "
                    f"{about['store'] or default_uri()}. Name that store by MLFLOW_TRACKING_URI=... or "
                    "loggers.mlflow.tracking_uri=..., or go on with logger=csv."
                ) from error
        run_id = run.info.run_id
        if run.info.lifecycle_stage != "active":
            raise UserError(
                f"The run {run_id} in MLflow has been deleted: restore it there, or resume with logger=csv."
            )
        if about["status"] == "RUNNING" and run.info.status != "RUNNING":  # it goes on
            client.update_run(run_id, status="RUNNING")
            if ENDED_BECAUSE in run.data.tags:
                client.delete_tag(run_id, ENDED_BECAUSE)
        self._describe(client, run, about)
        return run

    def _describe(self, client: MlflowClient, run: Run, about: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param

        if not (run.inputs and run.inputs.dataset_inputs):
            data = Dataset(about["dataset"], about["partition"][:36], "fedspa", about["source"])
            client.log_inputs(
                run.info.run_id, [DatasetInput(data, [InputTag("mlflow.data.context", "training")])]
            )
        params = flat_params(recorded_config(self._folder / "config.yaml"))
        new = [Param(key, value) for key, value in params.items() if key not in run.data.params]
        client.log_batch(run.info.run_id, params=new)

    def _send_rounds(
        self,
        client: MlflowClient,
        run_id: str,
        start: int,
        reached: Mapping[str, int],
        scores: Sequence[str],
    ) -> None:
        """Send the rounds after the last confirmed one; of those without an answer only what the store lacks.

        A run's page lists values in the order in which they first came, so the first round has all `scores`: NaN where
        it is not tested.
        """
        from mlflow.entities import Metric

        last = self.confirmed["round"]
        self._waiting += [row for row in self._rounds.new() if row[0] > last]
        if not self._waiting:
            return
        if not reached:
            round, seconds, values = self._waiting[0]
            self._waiting[0] = round, seconds, {**dict.fromkeys(scores, math.nan), **values}
        points = [
            Metric(key, value, start + int(1000 * seconds), round)
            for round, seconds, values in self._waiting
            for key, value in _named(values).items()
            if round > reached.get(key, 0)
        ]
        points.sort(key=lambda point: point.key)  # accuracy first
        client.log_batch(run_id, metrics=points)
        self._confirm(round=self._waiting[-1][0])
        self._waiting.clear()

    def _end(
        self, client: MlflowClient, run_id: str, about: dict[str, Any], reached: Mapping[str, int]
    ) -> None:
        """Close the run, and send its results, tags and files.

        All is tried, even if the store refuses a part. Then raises `OSError` for the first refusal.
        """
        from mlflow.entities import Metric, RunTag

        client.set_terminated(run_id, about["status"], about["end"])
        tags = {ENDED_BECAUSE: about["reason"]} if about["reason"] else {}
        values: dict[str, float] = {}
        if about["status"] == "FINISHED":
            summary = json.loads((self._folder / "summary.json").read_text())
            tags |= described(run_id, about["tags"][NOTE], summary)
            values = _named(final_metrics(summary))
        step = self.confirmed["round"]
        results = [Metric(key, values[key], about["end"], step) for key in sorted(values.keys() - reached)]
        calls: dict[str, Callable[[], object]] = {
            "results": partial(client.log_batch, run_id, results, tags=[RunTag(*tag) for tag in tags.items()])
        }
        for pattern in (*SMALL_FILES, *(["*.safetensors"] if about["weights"] else [])):
            for file in sorted(self._folder.glob(pattern)):
                if file.name not in (ABOUT, CONFIRMED):
                    calls[file.name] = partial(client.log_artifact, run_id, file)
        refused = []
        for what, call in calls.items():
            try:
                call()
            except Exception as error:  # stores of artifacts fail in ways of their own
                refused.append(f"{what}: {root_cause(error)}")
        if refused:
            raise OSError(refused[0])

    def _confirm(self, **news: Any) -> None:
        write_whole(self._folder / CONFIRMED, json.dumps({**self.confirmed, **news}))


def _named(values: Mapping[str, float]) -> dict[str, float]:
    """Values by names that MLflow takes."""
    return {re.sub(r"[^/\w.\- :]", "_", key): value for key, value in values.items()}
