"""The client's side of a round: receive the weights, let the method update the client, send the update."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedspa.core.client import ClientUpdate, Diverged, Initial
from fedspa.core.client_state import ClientState
from fedspa.core.records import Costs
from fedspa.core.server import ServerState
from fedspa.core.settings import FaultSettings
from fedspa.core.weights import all_finite
from fedspa.costs.charges import computed_costs
from fedspa.federated.client import ClientSetup, LocalClient
from fedspa.federated.client_states import Held, at_hand
from fedspa.federated.evaluation import Evaluator, PredictionBatch, Scores, score_one
from fedspa.federated.faults import Fault
from fedspa.federated.jobs import (
    OPTIONAL,
    CompletedUpdate,
    FailedUpdate,
    FineTuneJob,
    Job,
    UpdateFailed,
    UpdateJob,
)
from fedspa.federated.messages import Messages
from fedspa.methods.base import Method
from fedspa.methods.checking import check_state, check_update, checked_personal, title


@dataclass(frozen=True, kw_only=True)
class ClientRunner:
    """Does the jobs of clients. Each result is a function of the job and the global weights alone."""

    setup: ClientSetup
    method: Method
    messages: Messages
    evaluators: Sequence[Evaluator]
    faults: FaultSettings = field(default_factory=FaultSettings)
    wanted: Collection[str] = OPTIONAL
    """The optional vectors of an update that are wanted after it; the others need not travel between processes."""

    def first_state(self, client: int, initial: Initial) -> ClientState:
        """The state of a new client; made of the same objects for all clients where it is the same."""
        first = check_state(self.method, self.method.client_init(client, initial), initial.weights)
        own = self.setup.own_layers.first
        return first | own if own else first

    def perform(self, job: Job, server: ServerState) -> Any:
        """Do one job from the server's state.

        Returns:
            Of an `UpdateJob` a `CompletedUpdate` or a `FailedUpdate`, of a `FineTuneJob` the scores of the tuned model,
            of a `PredictionBatch` the predictions [n, ...].
        """
        match job:
            case UpdateJob():
                return self._update(job, server)
            case FineTuneJob():
                return self._finetune(job, server.weights)
            case PredictionBatch():
                return self._predict(job, server.weights)

    def work(self, job: Job) -> int:
        """Examples that a job goes through in a pass; of jobs of one kind, the larger one takes longer."""
        return len(job.rows if isinstance(job, PredictionBatch) else self.setup.client_rows[job.client])

    def _update(self, job: UpdateJob, server: ServerState) -> CompletedUpdate | FailedUpdate:
        sent = server if job.message is None else job.message
        client = self._client(job.round, job.client, job.first, sent.weights, job.state)
        try:
            return self._completed(job, client, sent)
        except UpdateFailed as error:
            return FailedUpdate(error.reason, str(error), error.costs, client.clock.seconds)

    def _completed(self, job: UpdateJob, client: LocalClient, server: ServerState) -> CompletedUpdate:
        """The client's side of a round: receive, start if new, update, send. Raises `UpdateFailed`."""
        method, known, costs = self.method, client.state.mask, Costs()
        if method.sends:
            server, costs = self.messages.down(client, server)
            client.weights = server.weights
        if job.fault is Fault.DROPOUT:
            raise UpdateFailed(job.fault, f"No answer from {client.title}.", costs)
        try:
            if job.prepares:
                update = method.client_prepare(client, server)
            else:
                if client.first:
                    client.state = check_state(method, method.client_start(client, server), server.weights)
                update = method.client_update(client, server)
            check_update(method, update, server.weights, job.prepares)
        except Diverged as error:  # the client notices, and sends nothing
            costs += Costs(train_flops=client.costs.train_flops)
            detail = f"The training of {client.title} diverged: its {error}."
            raise UpdateFailed(Fault.DIVERGED, detail, costs) from error
        batch = self.setup.training.batch_size
        costs += computed_costs(self.setup.network, client.costs, batch, method.uses_mask)
        update = client.with_own_layers(update)
        update, costs = self.messages.up(client, update, known, job.fault, costs)
        return self._accepted(client, update, costs)

    def _accepted(self, client: LocalClient, update: ClientUpdate, costs: Costs) -> CompletedUpdate:
        """The update, if it is finite and within the norm bound, and the scores of the local model."""
        assert update.state is not None
        vector, bound, clipped_from = update.update, self.faults.norm_bound, None
        if not _finite(update.local, vector, *update.tensors.values(), *update.state.values()):
            detail = f"The training of {client.title} diverged: its update is not finite."
            raise UpdateFailed(Fault.DIVERGED, detail, costs)
        if vector is not None and bound is not None:
            norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
            if norm > bound and self.faults.norm_action == "reject":
                detail = (
                    f"The update of {client.title} has norm {norm:.6g}, more than faults.norm_bound={bound}."
                )
                raise UpdateFailed(Fault.NORM_BOUND, detail, costs)
            if norm > bound:
                update, clipped_from = replace(update, update=vector * (bound / norm)), norm
        scores: Scores = {}
        if "local" in self.method.kinds and update.local is not None:
            with client.timed("evaluate"):
                scores = score_one(self.evaluators, self.setup.engine, update.local, [client.id])
        unwanted: dict[str, Any] = {name: None for name in OPTIONAL if name not in self.wanted}
        return CompletedUpdate(
            replace(update, **unwanted),
            client.loss,
            client.samples,
            costs,
            client.clock.seconds,
            scores,
            clipped_from,
        )

    def _finetune(self, job: FineTuneJob, weights: torch.Tensor) -> Scores:
        """Scores of a client's own copy of the global weights, trained by the client."""
        client = self._client(job.round, job.client, False, weights, job.own)
        model = client.finetune(job.epochs)
        return score_one(self.evaluators, self.setup.engine, model, [job.client])

    def _predict(self, job: PredictionBatch, weights: torch.Tensor) -> torch.Tensor:
        """The predictions of the job's model, made of the global weights [total]."""
        state, personal = at_hand(job.model.state), job.model.kind == "personal"
        model = weights
        if personal:
            model = checked_personal(self.method, self.method.personal(weights, state), weights)
        whole = self.setup.own_layers.complete(model, state, personal)
        return self.evaluators[job.evaluator].predict(self.setup.engine, whole, job.rows)

    def _client(
        self, round: int, client: int, first: bool, weights: torch.Tensor, state: Held
    ) -> LocalClient:
        return LocalClient(
            self.setup,
            id=client,
            round=round,
            first=first,
            weights=weights,
            state=at_hand(state),
            method=title(self.method),
        )


def _finite(*items: Any) -> bool:
    """Whether all tensors among these hold nothing but finite numbers."""
    return all(
        all_finite(item.flatten())
        for item in items
        if isinstance(item, torch.Tensor) and item.is_floating_point()
    )
