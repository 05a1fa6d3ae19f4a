"""The federated loop: which clients a round visits, in which order, and what becomes of their updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fedspa.clock import Clock
from fedspa.costs import NetworkCosts
from fedspa.engine import EagerEngine
from fedspa.errors import UserError
from fedspa.evaluation import Evaluator, Scores, spread
from fedspa.link import Link
from fedspa.masks.base import MaskSearcher
from fedspa.masks.packed import PackedMask
from fedspa.methods.base import ClientState, ClientTask, Method, Origin, Visit
from fedspa.methods.fedavg import FedAvg
from fedspa.methods.merge import Merge
from fedspa.randomness import generator, numpy_generator
from fedspa.records import Costs, RoundRecord
from fedspa.settings import EvalSettings, FederationSettings, TrainingSettings


def sample_clients(seed: int, round: int, clients: int, count: int) -> list[int]:
    """S_t: `count` of `clients`, uniformly without replacement, in ascending order."""
    chosen = numpy_generator(seed, "participants", round).choice(clients, size=count, replace=False)
    return sorted(int(client) for client in chosen)


@dataclass
class FederationState:
    """Everything that changes from round to round, and so all that a checkpoint has to hold."""

    weights: torch.Tensor
    """The dense global weights [total]."""
    round: int = 0
    """Completed rounds."""
    clients: dict[int, ClientState] = field(default_factory=dict)
    """States of the clients that were visited or tested; the others have their method's first state."""
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
        *,
        seed: int,
        federation: FederationSettings,
        training: TrainingSettings,
        evaluation: EvalSettings,
        method: Method,
        searcher: MaskSearcher | None,
        engine: EagerEngine,
        network: NetworkCosts,
        evaluators: Sequence[Evaluator],
        origin: Origin,
        client_rows: Sequence[np.ndarray],
        link: Link | None = None,
        on_visit: Callable[[int, Visit], None] = lambda client, visit: None,
    ) -> None:
        """
        Args:
            evaluators: one a set of test images; their metrics have different names.
            client_rows: int64, the training rows of each client.
            link: takes all that a visit sends through the wire format.
            on_visit: sees every visit before it is forgotten, in client order.
        """
        self._seed, self._federation, self._training, self._evaluation = seed, federation, training, evaluation
        self._method, self._searcher, self._engine, self._network = method, searcher, engine, network
        self._evaluators, self._origin, self._on_visit = evaluators, origin, on_visit
        self._client_rows, self._link = client_rows, link
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
        """What is remembered of a client; made on first demand."""
        if client not in self.state.clients:
            self.state.clients[client] = self._method.first_state(client, self._origin)
        return self.state.clients[client]

    def density(self, client: int) -> float:
        """Share of the parameters that the client's mask keeps active; 1 where it has none."""
        state = self.client_state(client)
        return state.density if isinstance(state, PackedMask) else 1.0

    def _round(self, clock: Clock) -> RoundRecord:
        state, t = self.state, self.state.round
        federation = self._federation
        participants = sample_clients(self._seed, t, federation.clients, federation.clients_per_round)

        merge = Merge(self._method.normaliser)
        costs = dense_costs = Costs()
        loss_sum, samples = 0.0, 0
        for task, visit in self._visits(participants, clock):
            if visit.update is not None:
                with clock("aggregate"):
                    merge.fold(visit.update, self._method.weight(len(task.rows)), visit.holds)
            self._remember(task.client, visit, clock)
            costs += visit.costs
            dense_costs += self._dense.visit_costs(task.size(), None)
            loss_sum += visit.loss * visit.samples
            samples += visit.samples

        with clock("aggregate"):
            state.weights = merge.apply(state.weights)
        state.round = t + 1
        state.costs += costs
        state.dense_costs += dense_costs
        if state.round % self._evaluation.every == 0 or state.round == federation.rounds:
            self._test(clock)
            scores = {
                kind: {metric: spread(values) for metric, values in by_metric.items()}
                for kind, by_metric in state.scores.items()
            }
        else:
            scores = {}
        return RoundRecord(
            round=state.round,
            participants=tuple(participants),
            learning_rate=self._training.lr_at(t),
            loss=loss_sum / samples,
            samples=samples,
            costs=costs,
            total_costs=state.costs,
            dense_costs=state.dense_costs,
            scores=scores,
            extras=self._searcher.describe(t) if self._searcher else {},
            seconds=clock.seconds,
        )

    def _visits(self, participants: Sequence[int], clock: Clock) -> Iterator[tuple[ClientTask, Visit]]:
        """Visit the participants one after another, all from the same global weights."""
        for client in participants:
            task = ClientTask(
                seed=self._seed,
                round=self.state.round,
                client=client,
                first_visit=client not in self.state.visits,
                rows=torch.from_numpy(self._client_rows[client]),
                learning_rate=self._training.lr_at(self.state.round),
                weights=self.state.weights,
                state=self.client_state(client),
                engine=self._engine,
                network=self._network,
                training=self._training,
                searcher=self._searcher,
                clock=clock,
            )
            visit = self._link.visit(self._method, task) if self._link else self._method.visit(task)
            if not torch.isfinite(visit.local).all():
                raise UserError(
                    f"The weights of client {client} in round {self.state.round + 1} are not finite (loss "
                    f"{visit.loss}): training diverged; lower training.lr={self._training.lr} or set "
                    f"training.clip_norm (now {self._training.clip_norm})."
                )
            yield task, visit

    def _remember(self, client: int, visit: Visit, clock: Clock) -> None:
        """Keep the client's next state, and test its local model while it is at hand."""
        state = self.state
        state.clients[client] = visit.state
        state.visits[client] = state.visits.get(client, 0) + 1
        self._on_visit(client, visit)
        if "local" in self._method.kinds:
            with clock("evaluate"):
                scores = self._score_one(visit.local, [client])
            for metric, values in scores.items():
                unknown = np.full(self._federation.clients, np.nan)
                state.scores.setdefault("local", {}).setdefault(metric, unknown)[client] = values[0]

    def _test(self, clock: Clock) -> None:
        """Test every client's global and personal model, where the method has them."""
        everyone = range(self._federation.clients)
        weights = self.state.weights
        with clock("evaluate"):
            if "global" in self._method.kinds:
                self.state.scores["global"] = self._score_one(weights, everyone)
            if "personal" in self._method.kinds:
                states = [self.client_state(client) for client in everyone]
                self.state.scores["personal"] = {
                    metric: values
                    for evaluator in self._evaluators
                    for metric, values in evaluator.personal(self._method, weights, states).items()
                }

    def _score_one(self, weights: torch.Tensor, clients: Sequence[int]) -> Scores:
        """Scores of one model [total] for each of `clients`, on every set of test images."""
        return {
            metric: values
            for evaluator in self._evaluators
            for metric, values in evaluator.one(weights, clients).items()
        }

    def finetune(self, epochs: int) -> Scores:
        """Scores after every client trained a copy of the final global weights once more, by metric."""
        final_round = self.state.round
        by_client = [
            self._score_one(
                self._engine.train(
                    self.state.weights,
                    torch.from_numpy(rows),
                    epochs=epochs,
                    learning_rate=self._training.lr_at(final_round),
                    generator=generator(self._seed, "finetune", final_round, client),
                ).weights,
                [client],
            )
            for client, rows in enumerate(self._client_rows)
        ]
        return {metric: np.concatenate([s[metric] for s in by_client]) for metric in by_client[0]}
