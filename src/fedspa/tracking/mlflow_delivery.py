"""How a run's metrics reach the tracking store: beside the run, and whatever the store does meanwhile.

A thread sends them. While the store is away or slow, the points wait in memory (and in the run's checkpoints)
and the thread tries again, after pauses that double up to a minute. No point is written twice: after a call
whose outcome is unknown, and after a resume, the store is asked how far each metric has come. A point that the
store refuses for what it is, such as a metric with a name that MLflow does not take, is left out: it must not hold
up the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedspa.core.errors import brief
from fedspa.tracking.mlflow_connection import root_cause

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

POINTS_A_CALL = 1000
"""MLflow's own limit on one batch."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Between two tries; each pause is twice the one before."""
PATIENCE_S = 10.0
"""How long the end of a run waits for the store's next answer."""
REFUSALS = (400, 413)
"""HTTP status of an answer that blames what was sent: it, or so much of it at once, will not be taken later either."""
SMALL_FILES = ("*.yaml", "*.csv", "*.json", "*.png")
UNDELIVERED = "mlflow_undelivered.json"
"""The file of a run's folder that holds what its store has not got."""


class Point(NamedTuple):
    """One value of a metric."""

    key: str
    value: float
    step: int
    timestamp: int
    """Milliseconds since 1970."""


@dataclass(frozen=True)
class Ending:
    """How a run ended, for the store."""

    status: str
    """FINISHED, FAILED or KILLED."""
    time: int
    """Milliseconds since 1970."""
    weights: bool
    """Whether weights and masks go up too, not only the small files."""
    tags: dict[str, str] = field(default_factory=dict)


class NotTaken(OSError):
    """What the store has not taken of a run that is closed in it, and why."""


class Outbox:
    """The points that a run in the store has not got yet, in order; sends them call by call."""

    def __init__(self, client: MlflowClient, run_id: str, points: Iterable[Point], in_doubt: bool) -> None:
        """`in_doubt`: the store may hold points from before, and has to be asked."""
        self._client, self._run_id = client, run_id
        self._points = list(points)
        self._in_doubt = in_doubt
        self._reached: dict[str, int] = {}
        self._size = POINTS_A_CALL
        self._refused: set[str] = set()
        self._sent: set[str] = set()
        """Of tags and files, by the names of `_last_calls`."""
        self._lock = threading.Lock()

    def add(self, points: Iterable[Point]) -> None:
        with self._lock:
            self._points.extend(points)

    @property
    def undelivered(self) -> list[Point]:
        """All points that the store has not acknowledged."""
        with self._lock:
            return list(self._points)

    def send(self) -> bool:
        """Send one call's worth of points; False where there is none. Raises whatever MLflow does.

        Of a batch that the store refuses the half is sent next, so that what it refuses comes to be alone.
        """
        batch = self._batch()
        if not batch:
            return False
        if self._in_doubt:
            latest = self._client.get_run(self._run_id).data.to_proto().metrics
            self._reached = {metric.key: metric.step for metric in latest}
        new = [point for point in batch if point.step > self._reached.get(point.key, -1)]
        self._in_doubt = True  # until the store answers
        if new and (refusal := self._log(new)):
            if len(batch) > 1:
                self._size = len(batch) // 2
                return True
            self._leave_out(batch[0], refusal)
        self._in_doubt = False
        self._size = min(2 * self._size, POINTS_A_CALL)
        with self._lock:
            del self._points[: len(batch)]
        return True

    def _batch(self) -> list[Point]:
        """The next points; one of a metric that was refused goes alone."""
        with self._lock:
            batch = self._points[: self._size]
        known = list(takewhile(lambda point: point.key not in self._refused, batch))
        return known or batch[:1]

    def _log(self, points: list[Point]) -> str:
        """Send points; why the store refuses them for what they are, empty where it takes them."""
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        metrics = [Metric(point.key, point.value, point.timestamp, point.step) for point in points]
        try:
            self._client.log_batch(self._run_id, metrics=metrics)
        except MlflowException as error:
            if error.get_http_status_code() not in REFUSALS:
                raise
            if self._client.get_run(self._run_id).info.lifecycle_stage != "active":
                raise  # a deleted run takes nothing, and may be restored
            return brief(error)
        return ""

    def _leave_out(self, point: Point, refusal: str) -> None:
        """Told once a metric: the points of the next rounds will hardly be better."""
        if point.key not in self._refused:
            log.warning(
                "loggers.mlflow: %s = %s is refused by the tracking store (%s): it is left out there.",
                point.key,
                point.value,
                refusal,
            )
        self._refused.add(point.key)

    def end(self, ending: Ending, folder: Path) -> Iterator[None]:
        """Send tags and files of the run's folder, and close the run in the store; yields after each call.

        What the store does not take keeps nothing else from it: the run is closed all the same. Raises `NotTaken`
        then, and whatever MLflow does where the run cannot be closed. Called again, it sends what is left.
        """
        refusal = ""
        for name, call in self._last_calls(ending, folder):
            if name in self._sent:
                continue
            if why := _failure(call):
                if not refusal:
                    self._close(ending)  # a store that is away altogether is not asked for each file
                refusal = refusal or f"{name}: {why}"
            else:
                self._sent.add(name)
                yield
        self._close(ending)
        if refusal:
            raise NotTaken(refusal)

    def _last_calls(self, ending: Ending, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
        """What is sent at the end, and how it is called."""
        for key, value in ending.tags.items():
            yield f"the tag {key}", partial(self._client.set_tag, self._run_id, key, value)
        for pattern in (*SMALL_FILES, *(["*.safetensors"] if ending.weights else [])):
            for file in sorted(folder.glob(pattern)):
                if file.name != UNDELIVERED:
                    yield file.name, partial(self._client.log_artifact, self._run_id, str(file))

    def _close(self, ending: Ending) -> None:
        self._client.set_terminated(self._run_id, ending.status, ending.time)


def _failure(call: Callable[[], object]) -> str:
    """Make a call; why it failed, empty where it did not. Stores of artifacts fail in ways of their own."""
    try:
        call()
    except Exception as error:
        return root_cause(error)
    return ""


class Delivery:
    """Empties an outbox from a thread of its own, until the run ends.

    To be made only after a run's worker processes: a fork of a process with several threads may find their locks
    held.
    """

    def __init__(self, outbox: Outbox, folder: Path, store: str) -> None:
        """`folder`: the run's own. `store`: how the warning names the store."""
        self.reason = ""
        """Why the last try failed; empty where it did not."""
        self._outbox, self._folder, self._store = outbox, folder, store
        self._changed = threading.Condition()
        self._due = self._given_up = self._done = self._warned = False
        self._ending: Ending | None = None
        self._last_answer = 0.0
        threading.Thread(target=self._run, name="mlflow", daemon=True).start()

    def wake(self) -> None:
        """Have the thread send what there is; returns at once."""
        with self._changed:
            self._due = True
            self._changed.notify_all()

    def finish(self, ending: Ending) -> bool:
        """Send all the rest and close the run in the store; gives up `PATIENCE_S` after its last answer.

        Returns whether the store got everything. If not, nothing more is sent but a call under way.
        """
        with self._changed:
            self._ending, self._due, self._last_answer = ending, True, time.monotonic()
            self._changed.notify_all()
            while not self._done and (left := self._last_answer + PATIENCE_S - time.monotonic()) > 0:
                self._changed.wait(left)
            self._given_up = True
            self._changed.notify_all()
            return self._done

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._given_up)
                self._due, ending = False, self._ending
            try:
                for _ in self._calls(ending):
                    self._last_answer = time.monotonic()
                    if self._given_up:
                        return
                pause, self.reason = FIRST_PAUSE_S, ""
                if ending:
                    break
            except Exception as error:  # the store, the network and the disk fail in many ways
                self.reason = root_cause(error)
                if not ending:  # whoever ends the run tells what is left then
                    self._warn()
                pause = self._rest(pause, ending)
            if self._given_up:
                return
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _calls(self, ending: Ending | None) -> Iterator[None]:
        """Makes the calls that there are to make, one for each step."""
        while self._outbox.send():
            yield
        if ending:
            yield from self._outbox.end(ending, self._folder)

    def _warn(self) -> None:
        """One warning a run, however often the store fails."""
        if not self._warned:
            log.warning(
                "loggers.mlflow: the tracking store %s takes no metrics now (%s): the run goes on, and they are kept "
                "until it does.",
                self._store,
                self.reason,
            )
        self._warned = True

    def _rest(self, pause: float, ending: Ending | None) -> float:
        """Wait before the next try, unless the run ends meanwhile. Returns the length of the next pause."""
        with self._changed:
            ended = self._changed.wait_for(lambda: self._given_up or self._ending is not ending, pause)
            self._due = True
        return FIRST_PAUSE_S if ended else min(2 * pause, LONGEST_PAUSE_S)
