"""What does not go as it should in a round: noted, counted, and where the policy says so the end of the run."""

from __future__ import annotations

from collections.abc import Mapping

from fedspa.errors import UserError, written
from fedspa.records import Event
from fedspa.rounds.faults import Fault
from fedspa.rounds.visitor import Call, Lost, Outcome
from fedspa.settings import FaultSettings, TrainingSettings

EMPTY_ROUND = "empty_round"
"""The event of a round of which nothing is left. The other kinds are those of `Fault`."""


class RoundEvents:
    """Collects the events of one round."""

    def __init__(
        self, settings: FaultSettings, training: TrainingSettings, totals: Mapping[str, int], visits: int
    ) -> None:
        """
        Args:
            training: what a sentence on divergence advises to change.
            totals: how many events of each kind there were before the round.
            visits: how many clients the round was to visit.
        """
        self.events: list[Event] = []
        self.totals = dict(totals)
        """How many of each kind there were in the run so far, this round included."""
        self._settings, self._training, self._left = settings, training, visits

    def note(self, call: Call, answer: Outcome | Lost) -> None:
        """Take note of how a visit ended. Raises `UserError` where the run may not go on without it."""
        if isinstance(answer, Lost):
            self._add(call.round, call.client, answer.reason, "left out", answer.detail)
            self._check_policy(answer)
            self._left -= 1
            if not self._left:
                detail = f"Nothing is left of round {call.round + 1}: the global weights stay as they are."
                self._add(call.round, None, EMPTY_ROUND, "weights kept", detail)
        elif answer.clipped_from is not None:
            detail = (
                f"The update of client {call.client} in round {call.round + 1} has norm {answer.clipped_from:.6g}, "
                f"more than faults.norm_bound={self._settings.norm_bound}."
            )
            self._add(call.round, call.client, Fault.NORM_BOUND, "clipped", detail)

    def _add(self, round: int, client: int | None, kind: str, action: str, detail: str) -> None:
        self.events.append(Event(round + 1, client, str(kind), action, detail))
        self.totals[str(kind)] = self.totals.get(kind, 0) + 1

    def _check_policy(self, lost: Lost) -> None:
        settings, training = self._settings, self._training
        if lost.reason is Fault.DIVERGED and settings.policy == "fail":
            raise UserError(
                f"{lost.detail.rstrip('.')}; lower training.lr={training.lr}, set training.clip_norm "
                f"(now {written(training.clip_norm)}), or go on without such clients by faults.policy=skip."
            )
        kinds = (Fault.DIVERGED, Fault.NORM_BOUND) if settings.norm_action == "reject" else (Fault.DIVERGED,)
        refused = sum(self.totals.get(kind, 0) for kind in kinds)
        if lost.reason in kinds and settings.max_skipped is not None and refused > settings.max_skipped:
            raise UserError(
                f"{refused} updates were refused, which is more than faults.max_skipped={settings.max_skipped}; "
                f"the last of them: {lost.detail}"
            )
