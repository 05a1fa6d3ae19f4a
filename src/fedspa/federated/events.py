"""Faults in a round: they are recorded and counted, and end the run if the policy says so."""

from __future__ import annotations

from collections.abc import Mapping

from fedspa.core.errors import UserError, written
from fedspa.core.records import Event
from fedspa.core.settings import FaultSettings, TrainingSettings
from fedspa.federated.faults import Fault
from fedspa.federated.jobs import CompletedUpdate, FailedUpdate, UpdateJob

EMPTY_ROUND = "empty_round"
"""The event of a round without any accepted update. The other kinds are those of `Fault`."""


class RoundEvents:
    """Collects the events of one round."""

    def __init__(
        self, settings: FaultSettings, training: TrainingSettings, totals: Mapping[str, int], updates: int
    ) -> None:
        """
        Args:
            training: the settings that a message on divergence advises to change.
            totals: the number of events of each kind before the round.
            updates: the number of clients that take part in the round.
        """
        self.events: list[Event] = []
        self.totals = dict(totals)
        """The number of events of each kind in the run so far, with this round."""
        self._settings, self._training, self._left = settings, training, updates

    def note(self, job: UpdateJob, result: CompletedUpdate | FailedUpdate) -> None:
        """Record how an update ended. Raises `UserError` if the run may not go on without it."""
        if isinstance(result, FailedUpdate):
            self._add(job.round, job.client, result.reason, "left out", result.detail)
            self._check_policy(result)
            self._left -= 1
            if not self._left:
                detail = f"Nothing is left of round {job.round + 1}: the global weights stay as they are."
                self._add(job.round, None, EMPTY_ROUND, "weights kept", detail)
        elif result.clipped_from is not None:
            detail = (
                f"The update of client {job.client} in round {job.round + 1} has norm {result.clipped_from:.6g}, "
                f"more than faults.norm_bound={self._settings.norm_bound}."
            )
            self._add(job.round, job.client, Fault.NORM_BOUND, "clipped", detail)

    def _add(self, round: int, client: int | None, kind: str, action: str, detail: str) -> None:
        self.events.append(Event(round + 1, client, str(kind), action, detail))
        self.totals[str(kind)] = self.totals.get(kind, 0) + 1

    def _check_policy(self, failed: FailedUpdate) -> None:
        settings, training = self._settings, self._training
        if failed.reason is Fault.DIVERGED and settings.policy == "fail":
            raise UserError(
                f"{failed.detail.rstrip('.')}; lower training.lr={training.lr}, set training.clip_norm "
                f"(now {written(training.clip_norm)}), or go on without such clients by faults.policy=skip."
            )
        kinds = (Fault.DIVERGED, Fault.NORM_BOUND) if settings.norm_action == "reject" else (Fault.DIVERGED,)
        refused = sum(self.totals.get(kind, 0) for kind in kinds)
        if failed.reason in kinds and settings.max_skipped is not None and refused > settings.max_skipped:
            raise UserError(
                f"{refused} updates were refused, which is more than faults.max_skipped={settings.max_skipped}; "
                f"the last of them: {failed.detail}"
            )
