"""The sums of a round over its updates: costs, loss, scores of local models, and events, which may end the run."""

from __future__ import annotations

from collections.abc import Mapping

from fedspa.core.clock import Clock
from fedspa.core.errors import UserError, written
from fedspa.core.records import Costs, Event
from fedspa.core.settings import FaultSettings, TrainingSettings
from fedspa.costs.charges import dense_costs
from fedspa.federated.client_setup import ClientSetup
from fedspa.federated.evaluation import Scores
from fedspa.federated.faults import Fault
from fedspa.federated.jobs import CompletedUpdate, FailedUpdate, UpdateJob

EMPTY_ROUND = "empty_round"
"""The event of a round without any accepted update. The other kinds are those of `Fault`."""


class RoundTally:
    """Adds up the results of one round, in the order of the calls."""

    def __init__(
        self, setup: ClientSetup, faults: FaultSettings, clock: Clock, costs: Costs, totals: Mapping[str, int]
    ) -> None:
        """
        Args:
            costs: the costs of the step before the updates.
            totals: the number of events of each kind before the round.
        """
        self._setup, self._faults, self._clock = setup, faults, clock
        self.costs, self.dense_costs = costs, Costs()
        self.samples = 0
        self.local_scores: dict[int, Scores] = {}
        self.events: list[Event] = []
        self.event_totals = dict(totals)
        """The number of events of each kind in the run so far, with this round."""
        self._loss_sum = 0.0

    @property
    def loss(self) -> float | None:
        """The mean loss over all trained samples; None if there are none."""
        return self._loss_sum / self.samples if self.samples else None

    def add(self, job: UpdateJob, result: CompletedUpdate | FailedUpdate) -> None:
        """Count one result. Raises `UserError` if the run may not go on without the update."""
        samples = self._setup.training.samples(len(self._setup.client_rows[job.client]))
        self._clock.add(result.seconds)
        self.costs += result.costs
        self.dense_costs += dense_costs(self._setup.network, samples, job.fault is not Fault.DROPOUT)
        if isinstance(result, FailedUpdate):
            self._note(job.round, job.client, result.reason, "left out", result.detail)
            _check_policy(result, self.event_totals, self._faults, self._setup.training)
            return
        self.local_scores[job.client] = result.local_scores
        if result.samples:
            self._loss_sum += float(result.loss) * result.samples
            self.samples += result.samples
        if result.clipped_from is not None:
            detail = (
                f"The update of client {job.client} in round {job.round + 1} has norm {result.clipped_from:.6g}, "
                f"more than faults.norm_bound={self._faults.norm_bound}."
            )
            self._note(job.round, job.client, Fault.NORM_BOUND, "clipped", detail)

    def finish(self, round: int) -> None:
        """Record a round (from 0) without any completed update."""
        if not self.local_scores:
            detail = f"Nothing is left of round {round + 1}: the global weights stay as they are."
            self._note(round, None, EMPTY_ROUND, "weights kept", detail)

    def _note(self, round: int, client: int | None, kind: str, action: str, detail: str) -> None:
        self.events.append(Event(round + 1, client, str(kind), action, detail))
        self.event_totals[str(kind)] = self.event_totals.get(kind, 0) + 1


def _check_policy(
    failed: FailedUpdate, totals: Mapping[str, int], settings: FaultSettings, training: TrainingSettings
) -> None:
    """Raise `UserError` if the settings end the run. `totals`: the number of events of each kind so far."""
    if failed.reason is Fault.DIVERGED and settings.policy == "fail":
        raise UserError(
            f"{failed.detail.rstrip('.')}; lower training.lr={training.lr}, set training.clip_norm "
            f"(now {written(training.clip_norm)}), or go on without such clients by faults.policy=skip."
        )
    kinds = (Fault.DIVERGED, Fault.NORM_BOUND) if settings.norm_action == "reject" else (Fault.DIVERGED,)
    refused = sum(totals.get(kind, 0) for kind in kinds)
    if failed.reason in kinds and settings.max_skipped is not None and refused > settings.max_skipped:
        raise UserError(
            f"{refused} updates were refused, which is more than faults.max_skipped={settings.max_skipped}; "
            f"the last of them: {failed.detail}"
        )
