"""Several trackers as one."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from fedspa.core.records import RoundRecord
from fedspa.core.tracker import RunInfo, RunResult, Tracker

log = logging.getLogger(__name__)


class Trackers:
    """Hands every call to each tracker, in order; itself a `Tracker`.

    The order is the run's folder, the console, then the loggers of the config, which read what the folder has.
    """

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = list(trackers)
        self._started: list[Tracker] = []

    def start(self, info: RunInfo) -> None:
        for tracker in self._trackers:
            self._started.append(tracker)  # before its start: one that fails half-way must be aborted too
            tracker.start(info)

    def round(self, record: RoundRecord) -> None:
        for tracker in self._started:
            tracker.round(record)

    def finish(self, result: RunResult) -> None:
        for tracker in self._started:
            tracker.finish(result)

    def abort(self, status: str, reason: str) -> None:
        """Abort those that were started; the run has failed already, so one that fails now is only logged."""
        for tracker in self._started:
            try:
                tracker.abort(status, reason)
            except Exception as error:
                if str(error) != reason:  # a full disk is reported once
                    log.warning("%s could not close the run: %s", type(tracker).__name__, error)
