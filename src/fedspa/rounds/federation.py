"""The federated loop: which clients a round visits, in which order, and what becomes of their updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedspa.client_state import ClientState
from fedspa.errors import UserError
from fedspa.masks.packed import PackedMask
from fedspa.methods.base import Origin, Visit, VisitSize
from fedspa.methods.fedavg import FedAvg
from fedspa.methods.merge import Merge
from fedspa.records import Costs, RoundRecord, Spread, saved_costs
from fedspa.rounds.client_states import ClientStates, Held, saved_states
from fedspa.rounds.clock import Clock
from fedspa.rounds.evaluation import Model, Scores, score_models, spread
from fedspa.rounds.events import RoundEvents
from fedspa.rounds.faults import Fault, FaultModel
from fedspa.rounds.sampling import sample_clients, sample_tested
from fedspa.rounds.scores import ClientScores, Kept, merged, saved_scores
from fedspa.rounds.visitor import Call, FineTuning, Lost, Visitor
from fedspa.running.executor import Executor
from fedspa.saved import Misfit, Saved
from fedspa.settings import EvalSettings, FederationSettings
from fedspa.weights import all_finite


@dataclass
class FederationState:
    """Everything that changes from round to round. What it holds is replaced, never written into."""

    weights: torch.Tensor
    """The dense global weights [total]."""
    round: int = 0
    """Completed rounds."""
    clients: ClientStates = field(default_factory=ClientStates)
    """States of the clients that were visited; the others have their method's first state."""
    visits: dict[int, int] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)
    dense_costs: Costs = field(default_factory=Costs)
    """What the same visits would have cost FedAvg."""
    events: dict[str, int] = field(default_factory=dict)
    """How many there were of each kind."""
    scores: Kept = field(default_factory=dict)
    """The latest ones."""
    changed: set[int] = field(default_factory=set)
    """The clients whose state has changed since personal models were tested last."""

    def draft(self) -> FederationState:
        """A state to work on, while this one stays as it is."""
        return replace(self, clients=self.clients.copy(), visits=dict(self.visits), changed=set(self.changed))


class FederatedLoop:
    """Runs rounds: sample, visit each client, fold its update, merge, test, report.

    A round is a transaction: `state` is that of the last complete round until the next one is complete.
    """

    def __init__(
        self,
        visitor: Visitor,
        executor: Executor,
        federation: FederationSettings,
        evaluation: EvalSettings,
        origin: Origin,
        on_visit: Callable[[Call, torch.Tensor, Visit], None] = lambda call, weights, visit: None,
        state_memory: float = float("inf"),
    ) -> None:
        """
        Args:
            visitor: what a visit is; `executor` makes its visits.
            origin: what the federation starts from.
            on_visit: sees every call, the global weights [total] it started from and its visit, in client order.
            state_memory: bytes of clients' states that are kept in memory, the others go to a file.
        """
        self._state_memory = state_memory
        self._visitor, self._executor, self._origin, self._on_visit = visitor, executor, origin, on_visit
        self._federation, self._evaluation, self._method = federation, evaluation, visitor.method
        self.tested = sample_tested(visitor.seed, federation.clients, evaluation.clients)
        """The clients whose global and personal models are tested."""
        self._dense = FedAvg(name="fedavg")  # what the same visits would have cost
        self._faults = FaultModel(
            visitor.faults,
            visitor.seed,
            samples=lambda client: visitor.training.samples(len(visitor.client_rows[client])),
        )
        self.state = FederationState(weights=origin.weights, clients=ClientStates(state_memory))

    def rounds(self) -> Iterator[RoundRecord]:
        """Run the rounds that are left, one for each item taken."""
        while self.state.round < self._federation.rounds:
            clock = Clock()
            with clock("total"):
                self.state, record = self._round(clock)
            yield record

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values, tensors and masks, for a checkpoint."""
        state, first = self.state, dict(self._visitor.first_state(0, self._origin))
        facts = {f: getattr(state, f) for f in ("weights", "round", "visits", "events")}
        # `first`, so that clients who still share the first state go on sharing it with those never visited.
        return facts | {
            "scores": {
                kind: {metric: [scores.clients, scores.values] for metric, scores in by_metric.items()}
                for kind, by_metric in state.scores.items()
            },
            "changed": sorted(state.changed),
            "costs": asdict(state.costs),
            "dense_costs": asdict(state.dense_costs),
            "clients": state.clients.at_rest(),
            "first": first,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave in another process, perhaps on another device.

        Raises `Misfit` for a state that cannot be of this federation; nothing has changed then.
        """
        saved, like = Saved(state, "loop"), self._origin.weights
        count, done = self._federation.clients, saved["round"].integer(high=self._federation.rounds)
        visits = {
            client.integer(high=count - 1): number.integer(1, done)
            for client, number in saved["visits"].items()
        }
        if set(saved["clients"].mapping()) != set(visits):
            raise Misfit("loop.clients must be the clients of loop.visits")
        first = self._visitor.first_state(0, self._origin)
        metrics = [name for evaluator in self._visitor.evaluators for name in evaluator.metrics]
        self.state = FederationState(
            weights=saved["weights"].tensor(like.dtype, like.shape).to(like.device),
            round=done,
            clients=saved_states(saved, first, like, self._state_memory),
            visits=visits,
            events={kind.text(): number.integer(1) for kind, number in saved["events"].items()},
            costs=saved_costs(saved["costs"]),
            dense_costs=saved_costs(saved["dense_costs"]),
            scores=saved_scores(saved["scores"], count, self._method.kinds, metrics),
            changed={client.integer(high=count - 1) for client in saved["changed"].sequence()},
        )

    def client_state(self, client: int, state: FederationState | None = None) -> ClientState:
        """What is remembered of a client; of one that was never visited, what its method starts from."""
        remembered = (state or self.state).clients
        if client in remembered:
            return remembered[client]
        return self._visitor.first_state(client, self._origin)

    def _held(self, client: int, state: FederationState) -> Held:
        """The same, unread where it lies in a file."""
        if client in state.clients:
            return state.clients.held(client)
        return self._visitor.first_state(client, self._origin)

    def mask(self, client: int) -> PackedMask:
        """A client's mask, of a method that remembers one."""
        mask = self.client_state(client).mask
        assert mask is not None
        return mask

    def density(self, client: int) -> float:
        """Share of the parameters that the client's mask keeps active; 1 where it has none."""
        mask, space = self.client_state(client).mask, self._visitor.space
        return 1.0 if mask is None else (mask.active - (space.total - space.trained)) / space.trained

    def densities(self) -> list[float]:
        """The density of each visited client."""
        return [self.density(client) for client in self.state.clients]

    def _round(self, clock: Clock) -> tuple[FederationState, RoundRecord]:
        """The next round: the state after it, and what it has to tell."""
        state, t = self.state.draft(), self.state.round
        training, searcher = self._visitor.training, self._visitor.searcher
        participants = sample_clients(
            self._visitor.seed, t, self._federation.clients, self._federation.clients_per_round
        )
        faults = self._faults.draw(t, participants)
        calls = [
            Call(t, client, client not in state.visits, self._held(client, state), faults.get(client))
            for client in participants
        ]

        merge = Merge(self._method.normaliser)
        costs = dense_costs = Costs()
        local_scores: dict[int, Scores] = {}
        loss_sum, samples = 0.0, 0
        events = RoundEvents(self._visitor.faults, training, state.events, visits=len(calls))
        for call, answer in zip(calls, self._executor.run(calls, state.weights), strict=True):
            rows = len(self._visitor.client_rows[call.client])
            clock.add(answer.seconds)
            costs += answer.costs
            dense_costs += self._dense_costs(rows, call.fault)
            events.note(call, answer)
            if isinstance(answer, Lost):
                continue
            visit = answer.visit
            self._on_visit(call, state.weights, visit)
            if visit.update is not None:
                with clock("aggregate"):
                    merge.fold(visit.update, self._method.weight(rows), visit.holds)
            self._remember(state, call.client, visit)
            local_scores[call.client] = answer.local_scores
            loss_sum += float(visit.loss) * visit.samples
            samples += visit.samples

        with clock("aggregate"):
            state.weights = _finite(merge.apply(state.weights), round=t + 1)
        state.round = t + 1
        state.scores = merged(state.scores, {"local": _together(local_scores)})
        state.costs += costs
        state.dense_costs += dense_costs
        state.events = events.totals
        tested = state.round % self._evaluation.every == 0 or state.round == self._federation.rounds
        if tested:
            with clock("evaluate"):
                self._test(state)
        return state, RoundRecord(
            round=state.round,
            participants=tuple(participants),
            learning_rate=training.lr_at(t),
            loss=loss_sum / samples if samples else None,
            samples=samples,
            costs=costs,
            total_costs=state.costs,
            dense_costs=state.dense_costs,
            scores=self._spreads(state) if tested else {},
            extras=searcher.describe(t) if searcher else {},
            seconds=clock.seconds,
            events=tuple(events.events),
            total_events=events.totals,
        )

    def _dense_costs(self, rows: int, fault: Fault | None) -> Costs:
        """What FedAvg would have been charged for such a visit."""
        size = VisitSize(self._visitor.network, self._visitor.training, rows)
        if fault is Fault.DROPOUT:
            return self._dense.down_costs(size, None)
        return self._dense.visit_costs(size, None)

    def _remember(self, state: FederationState, client: int, visit: Visit) -> None:
        """Keep the client's next state."""
        known = self.client_state(client, state)
        next_state = visit.state.sharing(known)
        if next_state is not known or client not in state.clients:
            state.clients[client] = next_state
        state.visits[client] = state.visits.get(client, 0) + 1
        state.changed.add(client)

    def _test(self, state: FederationState) -> None:
        """Test the global and the personal model of the clients whose models are tested, where the method has them."""
        models: list[tuple[Model, Sequence[int]]] = []
        if "global" in self._method.kinds:
            own = self._visitor.own_layers
            if own.first:
                models += _by_state(
                    "global", ((client, own.of(self._held(client, state))) for client in self.tested)
                )
            else:
                models.append((Model("global"), self.tested))
        if "personal" in self._method.kinds:
            models += _by_state(
                "personal", ((client, self._held(client, state)) for client in self._due(state))
            )
            state.changed = set()
        run = partial(self._executor.run, weights=state.weights)
        state.scores = merged(state.scores, score_models(self._visitor.evaluators, models, run))

    def spread(self, metric: str, scores: ClientScores) -> Spread:
        """How scores by this metric are spread over their clients, weighted as `eval.weighting` says."""
        return spread(self._visitor.evaluators, metric, scores, self._evaluation.weighting)

    def _spreads(self, state: FederationState) -> dict[str, dict[str, Spread]]:
        return {
            kind: {metric: self.spread(metric, scores) for metric, scores in by_metric.items()}
            for kind, by_metric in state.scores.items()
        }

    def _due(self, state: FederationState) -> Iterable[int]:
        """The tested clients whose personal models may be others than when they were tested last."""
        if self._method.personal_is_own and "personal" in state.scores:
            return [client for client in self.tested if client in state.changed]
        return self.tested

    def finetune(self, epochs: int) -> dict[str, ClientScores]:
        """Scores, by metric, after every tested client trained a copy of the final global weights once more."""
        own = self._visitor.own_layers
        jobs = [
            FineTuning(self.state.round, client, epochs, own.of(self._held(client, self.state)))
            for client in self.tested
        ]
        by_client = list(self._executor.run(jobs, self.state.weights))
        return _together(dict(zip(self.tested, by_client, strict=True)))

    def finetune_flops(self, epochs: int) -> int:
        """What that takes, which the costs of the rounds leave out."""
        training, rows = self._visitor.training, self._visitor.client_rows
        samples = sum(training.samples(len(rows[client]), epochs) for client in self.tested)
        return self._visitor.network.training_flops(None, samples)


def _together(scores: Mapping[int, Scores]) -> dict[str, ClientScores]:
    """The scores of clients of whom each was asked for alone, by metric."""
    metrics = next(iter(scores.values()), {})
    return {
        metric: ClientScores().updated(list(scores), np.concatenate([own[metric] for own in scores.values()]))
        for metric in metrics
    }


def _by_state(kind: str, states: Iterable[tuple[int, Held]]) -> list[tuple[Model, list[int]]]:
    """The models of clients in these states, each with its clients: those with one state have one model."""
    sharers: dict[Any, tuple[Model, list[int]]] = {}
    for client, held in states:
        identity = tuple((name, id(item)) for name, item in held.items())
        sharers.setdefault(identity, (Model(kind, held), []))[1].append(client)
    return list(sharers.values())


def _finite(weights: torch.Tensor, round: int) -> torch.Tensor:
    """The merged weights [total]. Raises `UserError` where updates, each of them finite, were too large for a sum."""
    if all_finite(weights):
        return weights
    raise UserError(
        f"The global weights of round {round} are not finite: the updates were too large to be added up; lower "
        "training.lr, or bound the updates with faults.norm_bound."
    )
