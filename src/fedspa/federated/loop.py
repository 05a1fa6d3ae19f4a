"""The federated loop (paper, Algorithm 1): sample clients, update them, aggregate, evaluate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fedspa.core.clock import Clock
from fedspa.core.errors import UserError
from fedspa.core.records import Costs, RoundRecord
from fedspa.core.settings import EvalSettings, FederationSettings
from fedspa.federated.client_runner import ClientRunner
from fedspa.federated.evaluation import spreads
from fedspa.federated.executor import Executor
from fedspa.federated.faults import FaultModel
from fedspa.federated.jobs import CompletedUpdate, FailedUpdate, UpdateJob
from fedspa.federated.model_tests import ModelTests, by_metric
from fedspa.federated.round_tally import RoundTally
from fedspa.federated.sampling import sample_clients, sample_tested
from fedspa.federated.scores import merged
from fedspa.federated.server import Server
from fedspa.federated.state import FederationState

OnUpdate = Callable[[UpdateJob, torch.Tensor, CompletedUpdate], None]
"""Called with a job, the global weights [total] that its update started from, and the completed update."""


class FederatedLoop:
    """Runs rounds. A round is a transaction: `state` is that of the last complete round."""

    def __init__(
        self,
        runner: ClientRunner,
        executor: Executor,
        federation: FederationSettings,
        evaluation: EvalSettings,
        state: FederationState,
        on_update: OnUpdate | None = None,
    ) -> None:
        """
        Args:
            runner: does a client's part. `executor` distributes its jobs.
            state: the state before round 1.
            on_update: called for every completed update, in client order.
        """
        self._runner, self._executor, self._on_update = runner, executor, on_update
        self._setup, self._method = runner.setup, runner.method
        self._federation, self._evaluation, self.state = federation, evaluation, state
        self._server = Server(self._method, self._setup, federation.clients)
        tested = sample_tested(self._setup.seed, federation.clients, evaluation.clients)
        self.tests = ModelTests(runner, executor, tested)
        self._faults = FaultModel(runner.faults, self._setup.seed, samples=self._samples)

    def rounds(self) -> Iterator[RoundRecord]:
        """Run the remaining rounds, one for each item taken."""
        while self.state.round < self._federation.rounds:
            clock = Clock()
            with clock("total"):
                self.state, record = self._round(clock)
            yield record

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values, tensors and masks, for a checkpoint."""
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self.state = self.state.loaded(state)

    def _round(self, clock: Clock) -> tuple[FederationState, RoundRecord]:
        """Run the next round. Returns the state after it, and its record."""
        state, t = self.state.draft(), self.state.round
        prepared = self._prepare(state, clock) if t == 0 and self._method.prepares else Costs()

        # 1. Sample the participants (Algorithm 1, line 3).
        participants = sample_clients(
            self._setup.seed, t, self._federation.clients, self._federation.clients_per_round
        )
        faults = self._faults.draw(t, participants)
        jobs = [self._server.job(state, client, faults.get(client)) for client in participants]

        # 2. Each of them receives the weights, trains, and sends its update; the server adds it.
        aggregator = self._server.aggregator()
        tally = RoundTally(self._setup, self._runner.faults, clock, prepared, state.events)
        for job, result in zip(jobs, self._executor.run(jobs, state.server), strict=True):
            tally.add(job, result)
            if isinstance(result, FailedUpdate):
                continue
            if self._on_update is not None:
                self._on_update(job, state.weights, result)
            with clock("aggregate"):
                aggregator.add(result.update, self._server.weight(job.client))
            state.remember(job.client, result.update)
        tally.finish(t)

        # 3. The server updates its weights.
        with clock("aggregate"):
            state.server = self._server.step(state.server, aggregator, round=t + 1)
        state.round = t + 1

        # 4. Evaluate: local models were tested by the jobs above, the others are tested here.
        state.scores = merged(state.scores, {"local": by_metric(tally.local_scores)})
        tested = state.round % self._evaluation.every == 0 or state.round == self._federation.rounds
        if tested:
            with clock("evaluate"):
                state.scores = self.tests.scores(state)

        # 5. Record.
        state.costs += tally.costs
        state.dense_costs += tally.dense_costs
        state.events = tally.event_totals
        return state, RoundRecord(
            round=state.round,
            participants=tuple(participants),
            learning_rate=self._setup.training.lr_at(t),
            loss=tally.loss,
            samples=tally.samples,
            costs=tally.costs,
            total_costs=state.costs,
            dense_costs=state.dense_costs,
            scores=spreads(self._runner.evaluators, state.scores, self._evaluation.weighting)
            if tested
            else {},
            extras={**self._method.describe(t), **state.explored()},
            seconds=clock.seconds,
            events=tuple(tally.events),
            total_events=state.events,
        )

    def _prepare(self, state: FederationState, clock: Clock) -> Costs:
        """The step before round 1: all clients send a message, and the server uses it. Returns the costs."""
        aggregator, costs = self._server.aggregator(), Costs()
        jobs = [
            UpdateJob(0, client, first=True, state=state.stored_state(client), prepares=True)
            for client in range(self._federation.clients)
        ]
        for job, result in zip(jobs, self._executor.run(jobs, state.server), strict=True):
            if isinstance(result, FailedUpdate):
                raise UserError(f"{result.detail} All clients must answer before round 1.")
            clock.add(result.seconds)
            costs += result.costs
            aggregator.add(result.update, self._server.weight(job.client))
        state.server = self._server.step(state.server, aggregator, round=0)
        return costs

    def _samples(self, client: int) -> int:
        """The samples that an update of a client trains on."""
        return self._setup.training.samples(len(self._setup.client_rows[client]))
