"""The sums of a round, over its updates: costs, loss, scores of local models, events."""

from __future__ import annotations

from fedspa.core.clock import Clock
from fedspa.core.records import Costs
from fedspa.costs.charges import dense_costs
from fedspa.federated.client import ClientSetup
from fedspa.federated.evaluation import Scores
from fedspa.federated.events import RoundEvents
from fedspa.federated.faults import Fault
from fedspa.federated.jobs import CompletedUpdate, FailedUpdate, UpdateJob


class RoundTally:
    """Adds up the results of one round, in the order of the calls."""

    def __init__(self, setup: ClientSetup, events: RoundEvents, clock: Clock, costs: Costs) -> None:
        """`costs`: the costs of the step before the updates."""
        self._events, self._setup, self._clock = events, setup, clock
        self.costs, self.dense_costs = costs, Costs()
        self.samples = 0
        self.local_scores: dict[int, Scores] = {}
        self._loss_sum = 0.0

    def add(self, job: UpdateJob, result: CompletedUpdate | FailedUpdate) -> None:
        """Count one result. Raises `UserError` if the run may not go on without the update."""
        rows = len(self._setup.client_rows[job.client])
        samples, answered = self._setup.training.samples(rows), job.fault is not Fault.DROPOUT
        self._clock.add(result.seconds)
        self.costs += result.costs
        self.dense_costs += dense_costs(self._setup.network, samples, answered)
        self._events.note(job, result)
        if isinstance(result, CompletedUpdate):
            self.local_scores[job.client] = result.local_scores
            if result.samples:
                self._loss_sum += float(result.loss) * result.samples
                self.samples += result.samples

    @property
    def loss(self) -> float | None:
        """The mean loss over all trained samples; None if there are none."""
        return self._loss_sum / self.samples if self.samples else None
