"""A run that is mirrored in MLflow while it goes on: by a thread of its own, so that no round waits."""

from __future__ import annotations

import json
import logging
import shlex
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar
from uuid import uuid4

from fedspa.core.errors import UserError
from fedspa.core.files import write_whole
from fedspa.core.limits import Component, limited
from fedspa.core.names import score_columns
from fedspa.core.records import RoundRecord
from fedspa.core.tracker import RunInfo, RunResult
from fedspa.tracking.mirror import ABOUT, Mirror
from fedspa.tracking.page import PARENT, tags
from fedspa.tracking.store import OTHERWISE, default_uri, root_cause, store_needed, store_uri, where_to_look

log = logging.getLogger(__name__)

LONGEST_PAUSE_S, LAST_PAUSE_S = 60.0, 1.0
"""Between two tries of a store that is away: during the run at most, and at its end."""
PATIENCE_S = 30.0
"""The longest time for which the end of a run waits for the store."""
OTHER_STORE = (
    "name the one that has the run's beginning with loggers.mlflow.tracking_uri=..., or go on with logger=csv"
)


@dataclass(kw_only=True)
class MLflowTracker(Component):
    """Has a run mirrored in a tracking store; beside a database, artifacts go to outputs/mlflow-artifacts."""

    section: ClassVar[str] = "loggers.mlflow"
    takes_files: ClassVar[bool] = True
    """True if a run can send weights and masks to it."""
    name: str = "mlflow"
    experiment: str = "fedspa"
    tracking_uri: str | None = None
    """null: the environment's MLFLOW_TRACKING_URI, else mlflow.db in the project's root."""
    flush_seconds: float = limited(5.0, low=0, low_open=True)
    """The time between two updates of the mirror."""
    parent_run_id: str | None = None
    """The run of the sweep that this run belongs to; set by the sweep."""
    run_name: str | None = None
    """In MLflow; null: the run's `name`. A sweep names its jobs by the settings that differ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.uri = self.tracking_uri or store_uri()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._open = self._given_up = False
        self._reason = ""
        """Why the last try failed; empty where it did not."""

    def start(self, info: RunInfo) -> None:
        """Open the run in the store. Raises `UserError` where that fails: later on the run goes on without it."""
        self._folder, before = info.folder, {}
        with suppress(UserError):
            before = (earlier := Mirror(info.folder)).about
            self.uri = self.tracking_uri or earlier.uri
        self._mirror, dataset = Mirror(info.folder, self.uri), info.config.get("dataset", {})
        with store_needed(self.uri, OTHER_STORE if self._mirror.confirmed else OTHERWISE):
            self._about = {
                "store": "" if self.uri == default_uri() else self.uri,
                "experiment": self.experiment,
                "name": self.run_name or str(info.config.get("name", "run")),
                "start": before.get("start") or uuid4().hex,
                "tags": tags(info) | ({PARENT: self.parent_run_id} if self.parent_run_id else {}),
                "dataset": info.names.get("dataset", ""),
                "source": str(dataset.get("path") or dataset.get("hub") or "fedspa"),
                "partition": info.partition_hash,
                "scores": score_columns(info.kinds, info.metrics),
                "weights": bool(info.config.get("save", {}).get("upload_weights", False)),
            }
            self._open = True
            self._write_about("RUNNING")
            self._mirror.sync()
        # Only now, after the run's worker processes: a fork of a process with several threads may find locks held.
        self._thread = threading.Thread(target=self._follow, name="mlflow", daemon=True)
        self._thread.start()

    def round(self, record: RoundRecord) -> None:
        """Nothing: the thread reads the round in the run's folder."""

    def finish(self, result: RunResult) -> None:
        if self._end("FINISHED") and not self.parent_run_id:  # a sweep ends with one address for all its jobs
            print(f"In MLflow: {where_to_look(self.uri, self._mirror.page)}")

    def abort(self, status: str, reason: str) -> None:
        self._end(status, reason)

    def _write_about(self, status: str, reason: str = "") -> None:
        """Write into the folder what the run is, and its status."""
        end = None if status == "RUNNING" else round(time.time() * 1000)
        about = {**self._about, "status": status, "reason": reason, "end": end}
        write_whole(self._folder / ABOUT, json.dumps(about, indent=2) + "\n")

    def _end(self, status: str, reason: str = "") -> bool:
        """Wait a while until the store has everything; else print the command that sends the rest.

        Returns True if the store has everything.
        """
        if not self._open:  # the run never began, or has ended
            return False
        self._open = False
        self._write_about(status, reason)
        if (thread := self._thread) is None:  # the run was created, perhaps, and no more
            with suppress(Exception):
                if self._mirror.confirmed:
                    self._mirror.sync()
            return False
        self._ending.set()
        thread.join(PATIENCE_S)
        self._given_up = True
        if thread.is_alive():
            print(
                f"MLflow at {self.uri} does not have everything yet ({self._reason or 'no answer'}): "
                f"python src/sync.py {shlex.quote(str(self._folder))} sends the rest."
            )
        return not thread.is_alive()

    def _follow(self) -> None:
        """Bring the mirror up to date from time to time; while the store is away, try again ever more seldom."""
        pause, warned = self.flush_seconds, False
        while True:
            ended = self._ending.wait(pause)
            if self._given_up:
                return
            try:
                self._mirror.sync()
                pause, self._reason = self.flush_seconds, ""
                if ended:
                    return
            except Exception as error:  # the store, the network and the disk fail in many ways
                pause, self._reason = min(2 * pause, LONGEST_PAUSE_S), root_cause(error)
                if ended:
                    time.sleep(LAST_PAUSE_S)
                elif not warned:
                    log.warning(
                        "loggers.mlflow: the tracking store %s takes nothing now (%s): the run goes on, and its folder "
                        "keeps everything until it does.",
                        self.uri,
                        self._reason,
                    )
                    warned = True
