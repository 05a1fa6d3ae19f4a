"""The federated loop: which clients a round visits, in which order, and what becomes of their updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from fedspa.clock import Clock
from fedspa.evaluation import Scores, score_one, score_personal, spread
from fedspa.executor import Executor
from fedspa.masks.packed import PackedMask
from fedspa.methods.base import ClientState, Origin, Visit, VisitSize
from fedspa.methods.fedavg import FedAvg
from fedspa.methods.merge import Merge
from fedspa.records import Costs, RoundRecord, Spread
from fedspa.sampling import sample_clients
from fedspa.settings import EvalSettings, FederationSettings
from fedspa.visitor import Call, FineTuning, Outcome, Visitor


@dataclass
class FederationState:
    """Everything that changes from round to round, and so all that a checkpoint has to hold."""

    weights: torch.Tensor
    """The dense global weights [total]."""
    round: int = 0
    """Completed rounds."""
    clients: dict[int, ClientState] = field(default_factory=dict)
    """States of the clients that were visited; the others have their method's first state."""
    visits: dict[int, int] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)
    dense_costs: Costs = field(default_factory=Costs)
    """What the same visits would have cost FedAvg."""
    scores: dict[str, Scores] = field(default_factory=dict)
    """Latest scores by kind of model and metric: float64 [clients], NaN where a client has none."""


class FederatedLoop:
    """Runs rounds: sample, visit each client, fold its update, merge, test, report."""

    def __init__(
        self,
        visitor: Visitor,
        executor: Executor,
        federation: FederationSettings,
        evaluation: EvalSettings,
        origin: Origin,
        on_visit: Callable[[Call, torch.Tensor, Visit], None] = lambda call, weights, visit: None,
    ) -> None:
        """
        Args:
            visitor: what a visit is; `executor` makes its visits.
            origin: what the federation starts from.
            on_visit: sees every call, the global weights [total] it started from and its visit, in client order.
        """
        self._visitor, self._executor, self._origin, self._on_visit = visitor, executor, origin, on_visit
        self._federation, self._evaluation, self._method = federation, evaluation, visitor.method
        self._dense = FedAvg(name="fedavg")  # what the same visits would have cost
        self.state = FederationState(weights=origin.weights)

    def rounds(self) -> Iterator[RoundRecord]:
        """Run the rounds that are left, one for each item taken."""
        while self.state.round < self._federation.rounds:
            clock = Clock()
            with clock("total"):
                record = self._round(clock)
            yield record

    def client_state(self, client: int) -> ClientState:
        """What is remembered of a client; of one that was never visited, what its method starts from."""
        if client in self.state.clients:
            return self.state.clients[client]
        return self._method.first_state(client, self._origin)

    def density(self, client: int) -> float:
        """Share of the parameters that the client's mask keeps active; 1 where it has none."""
        state = self.client_state(client)
        return state.density if isinstance(state, PackedMask) else 1.0

    def _round(self, clock: Clock) -> RoundRecord:
        state, t = self.state, self.state.round
        training, searcher = self._visitor.training, self._visitor.searcher
        participants = sample_clients(
            self._visitor.seed, t, self._federation.clients, self._federation.clients_per_round
        )
        calls = [
            Call(t, client, first_visit=client not in state.visits, state=self.client_state(client))
            for client in participants
        ]

        merge = Merge(self._method.normaliser)
        costs = dense_costs = Costs()
        loss_sum, samples = 0.0, 0
        for call, outcome in zip(calls, self._executor.run(calls, state.weights), strict=True):
            visit, rows = outcome.visit, len(self._visitor.client_rows[call.client])
            self._on_visit(call, state.weights, visit)
            if visit.update is not None:
                with clock("aggregate"):
                    merge.fold(visit.update, self._method.weight(rows), visit.holds)
            self._remember(call.client, outcome)
            clock.add(outcome.seconds)
            costs += visit.costs
            dense_costs += self._dense.visit_costs(VisitSize(self._visitor.network, training, rows), None)
            loss_sum += float(visit.loss) * visit.samples
            samples += visit.samples

        with clock("aggregate"):
            state.weights = merge.apply(state.weights)
        state.round = t + 1
        state.costs += costs
        state.dense_costs += dense_costs
        tested = state.round % self._evaluation.every == 0 or state.round == self._federation.rounds
        if tested:
            with clock("evaluate"):
                self._test()
        return RoundRecord(
            round=state.round,
            participants=tuple(participants),
            learning_rate=training.lr_at(t),
            loss=loss_sum / samples,
            samples=samples,
            costs=costs,
            total_costs=state.costs,
            dense_costs=state.dense_costs,
            scores=self._spreads() if tested else {},
            extras=searcher.describe(t) if searcher else {},
            seconds=clock.seconds,
        )

    def _remember(self, client: int, outcome: Outcome) -> None:
        """Keep the client's next state and the scores of its local model."""
        state, known, next_state = self.state, self.client_state(client), outcome.visit.state
        # Clients that share a mask go on sharing one object, also where the visit was made by another process.
        keeps = isinstance(next_state, PackedMask) and next_state == known
        state.clients[client] = known if keeps else next_state
        state.visits[client] = state.visits.get(client, 0) + 1
        for metric, values in outcome.local_scores.items():
            unknown = np.full(self._federation.clients, np.nan)
            state.scores.setdefault("local", {}).setdefault(metric, unknown)[client] = values[0]

    def _test(self) -> None:
        """Test every client's global and personal model, where the method has them."""
        everyone, state, evaluators = range(self._federation.clients), self.state, self._visitor.evaluators
        if "global" in self._method.kinds:
            state.scores["global"] = score_one(evaluators, state.weights, everyone)
        if "personal" in self._method.kinds:
            states = [self.client_state(client) for client in everyone]
            state.scores["personal"] = score_personal(evaluators, self._method, state.weights, states)

    def _spreads(self) -> dict[str, dict[str, Spread]]:
        return {
            kind: {metric: spread(values) for metric, values in by_metric.items()}
            for kind, by_metric in self.state.scores.items()
        }

    def finetune(self, epochs: int) -> Scores:
        """Scores after every client trained a copy of the final global weights once more, by metric."""
        jobs = [FineTuning(self.state.round, client, epochs) for client in range(self._federation.clients)]
        by_client = list(self._executor.run(jobs, self.state.weights))
        return {metric: np.concatenate([scores[metric] for scores in by_client]) for metric in by_client[0]}
