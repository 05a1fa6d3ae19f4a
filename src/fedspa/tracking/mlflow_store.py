"""A run in MLflow: settings as params, curves as metrics by round, the folder's files as artifacts.

The client is used without MLflow's global "active run", so that runs in one process cannot mix. Metrics are
buffered, since a call for each point is 25 times slower than a batch every ten rounds, and sent by a thread of
their own (see `mlflow_delivery`): once the run has begun, no failure of the store touches it.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

from fedspa.core.errors import UserError, check_range
from fedspa.core.files import write_whole
from fedspa.core.records import RoundRecord, RunInfo, RunResult
from fedspa.core.saved import Saved
from fedspa.tracking.local_store import is_missing
from fedspa.tracking.measures import final_metrics, round_metrics
from fedspa.tracking.mlflow_connection import (
    from_note,
    noted,
    open_store,
    run_page,
    store_needed,
    store_uri,
    where_to_look,
)
from fedspa.tracking.mlflow_delivery import UNDELIVERED, Delivery, Ending, Outbox, Point
from fedspa.tracking.mlflow_page import PARENT, dataset_input, final_tags, tags
from fedspa.tracking.undelivered import Undelivered

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PARAM_LENGTH, PARAMS_A_CALL = 500, 100
"""MLflow's own limits on a value and on one batch."""
START, START_FILE = "start", ".mlflow_start"
"""The tag, and the file of the run's folder, by which a run that was killed at its start is found again."""
OTHER_STORE = (
    "name the one that has the run's beginning with loggers.mlflow.tracking_uri=..., or go on with logger=csv"
)
"""What can be done where a run that goes on is not in the store."""
ENDED_BECAUSE = "ended_because"
"""The tag of a run that ended early."""


@dataclass(kw_only=True)
class MLflowTracker:
    """Follows a run in a tracking store; beside a database, artifacts go to outputs/mlflow-artifacts."""

    takes_files: ClassVar[bool] = True
    """Whether a run can send weights and masks to it."""
    name: str = "mlflow"
    experiment: str = "fedspa"
    tracking_uri: str | None = None
    """null: the environment's MLFLOW_TRACKING_URI, else mlflow.db in the project's root."""
    flush_rounds: int = 10
    flush_seconds: float = 5.0
    """The buffer is sent once it holds so many rounds, or so much time after the last time."""
    parent_run_id: str | None = None
    """The run of the sweep that this run belongs to; set by the sweep."""
    run_name: str | None = None
    """In MLflow; null: the run's `name`. A sweep calls its jobs by what differs between them."""

    def __post_init__(self) -> None:
        check_range("loggers.mlflow.flush_rounds", self.flush_rounds, low=1)
        check_range("loggers.mlflow.flush_seconds", self.flush_seconds, low=0)
        self._run_id, self.uri = "", self.tracking_uri or store_uri()
        self._kept: list[Point] = []
        self._outbox: Outbox | None = None
        self._delivery: Delivery | None = None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on in the same run of the store, without a point doubled or missing."""
        if self._outbox is None:
            return {}
        return {"run_id": self._run_id, "tracking_uri": noted(self.uri), "points": self._outbox.undelivered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the run of a `state_dict`: in its own store, unless the config names one."""
        self._run_id, self.uri, self._kept = "", self.tracking_uri or store_uri(), []
        if state:
            saved = Saved(state, "mlflow")
            run_id, note = saved["run_id"].text(), saved["tracking_uri"].text()
            self._kept = [_saved_point(point) for point in saved["points"].sequence()]
            self._run_id, self.uri = run_id, self.tracking_uri or from_note(note)

    def start(self, info: RunInfo) -> None:
        """Open the run in the store. Raises `UserError` where that fails: later on the run goes on without it."""
        self._info = info
        if self._run_id and is_missing(self.uri):
            raise UserError(f"There is no tracking store at {self.uri} to go on in: {OTHER_STORE}.")
        self._client, self._experiment_id = open_store(self.uri, self.experiment)
        with store_needed(self.uri):
            self._run_id = self._run_id or self._begun()
            if resumed := bool(self._run_id):
                self._reopen()
            else:
                self._create()
        self._outbox = Outbox(self._client, self._run_id, self._kept, in_doubt=resumed)
        self._delivery = Delivery(self._outbox, info.folder, self.uri)
        self._waiting, self._flushed = 0, time.monotonic()

    def open_store(self) -> tuple[MlflowClient, str]:
        """A client of the tracking store, and the experiment's id. Raises `UserError` if there is none to be had."""
        return open_store(self.uri, self.experiment)

    def round(self, record: RoundRecord) -> None:
        self._add(round_metrics(record), record.round)
        self._waiting += 1
        waited = time.monotonic() - self._flushed
        if self._delivery and (self._waiting >= self.flush_rounds or waited >= self.flush_seconds):
            self._delivery.wake()
            self._waiting, self._flushed = 0, time.monotonic()

    def finish(self, result: RunResult) -> None:
        self._add(final_metrics(result.summary), self._info.rounds)
        if self._end("FINISHED", final_tags(self._info, result.summary)):
            page = run_page(self._experiment_id, self._run_id)
            print(f"In MLflow: {where_to_look(self.uri, page)}")

    def abort(self, status: str, reason: str) -> None:
        self._end(status, {ENDED_BECAUSE: reason})

    def _begun(self) -> str:
        """The run that an earlier start in this folder created and had no checkpoint to remember; empty without one.

        Each start leaves a word in the folder before it creates a run, and the run bears it as a tag.
        """
        file = self._info.folder / START_FILE
        try:
            self._start = file.read_text()
        except OSError:
            self._start = uuid4().hex
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, self._start)
            return ""
        found = self._client.search_runs(
            [self._experiment_id], f"tags.{START} = '{self._start}'", max_results=1
        )
        return found[0].info.run_id if found else ""

    def _create(self) -> None:
        info = self._info
        shown = tags(info) | ({PARENT: self.parent_run_id} if self.parent_run_id else {})
        name = self.run_name or str(info.config.get("name", "run"))
        shown |= {START: self._start}
        self._run_id = self._client.create_run(self._experiment_id, run_name=name, tags=shown).info.run_id
        try:
            self._describe()
        except Exception:
            with suppress(Exception):  # what failed is told, and not that this did too
                self._client.set_terminated(self._run_id, "FAILED")
            raise

    def _describe(self, known: Run | None = None) -> None:
        """Tell of the data and the settings; `known`: what the store has of the run already."""
        from mlflow.entities import Param

        info, told = self._info, known.data.params if known else {}
        if not (known and known.inputs and known.inputs.dataset_inputs):
            self._client.log_inputs(self._run_id, [dataset_input(info)])
        params = [Param(key, value) for key, value in flat_params(info.config).items() if key not in told]
        for start in range(0, len(params), PARAMS_A_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + PARAMS_A_CALL])

    def _reopen(self) -> None:
        """The run goes on where it was: RUNNING again, whatever became of it."""
        with store_needed(self.uri, OTHER_STORE):
            run = self._client.get_run(self._run_id)
        if run.info.lifecycle_stage != "active":
            raise UserError(
                f"The run {self._run_id} in MLflow has been deleted: restore it there, or resume with logger=csv."
            )
        # What an earlier end left undelivered is in the checkpoint too, or comes again in the rounds after it.
        (self._info.folder / UNDELIVERED).unlink(missing_ok=True)
        self._client.update_run(self._run_id, status="RUNNING")
        self._describe(run)  # it may have been killed before that
        if ENDED_BECAUSE in run.data.tags:
            self._client.delete_tag(self._run_id, ENDED_BECAUSE)

    def _add(self, metrics: Mapping[str, float], step: int) -> None:
        assert self._outbox
        now = _now()
        self._outbox.add(Point(key, value, step, now) for key, value in metrics.items())

    def _end(self, status: str, tags: dict[str, str]) -> bool:
        """Close the run in the store; what the store does not take is left in the run's folder, and told."""
        if self._outbox is None or self._delivery is None:  # the run never began, or has ended
            return False
        ending = Ending(status, _now(), self._upload_weights, tags)
        delivery, self._delivery = self._delivery, None
        (self._info.folder / START_FILE).unlink(missing_ok=True)
        if delivery.finish(ending):
            return True
        rest = Undelivered(noted(self.uri), self._run_id, self._outbox.undelivered, ending)
        rest.save(self._info.folder)
        print(
            f"MLflow at {self.uri} did not get everything ({delivery.reason or 'no answer'}): "
            f"python src/deliver.py {shlex.quote(str(self._info.folder))} sends the rest."
        )
        return False

    @property
    def _upload_weights(self) -> bool:
        return bool(self._info.config.get("save", {}).get("upload_weights", False))


def _saved_point(saved: Saved) -> Point:
    key, value, step, timestamp = saved.sequence(4)
    return Point(key.text(), value.number(finite=False), step.integer(), timestamp.integer())


def flat_params(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The config as MLflow params: dotted keys, values as one would type them, at most 500 characters.

    Left out: `_target_` (the name says it) and the loggers (they change nothing in a run).
    """
    params: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            params |= {} if prefix + key == "loggers" else flat_params(value, f"{prefix}{key}.")
        elif key != "_target_":
            text = value if isinstance(value, str) else json.dumps(value)
            params[prefix + key] = text[:PARAM_LENGTH]
    return params


def _now() -> int:
    """MLflow's timestamps are milliseconds since 1970."""
    return round(time.time() * 1000)
