"""Everything of a federation that changes from round to round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fedspa.core.client import ClientUpdate, Initial
from fedspa.core.client_state import ClientState
from fedspa.core.packed_mask import PackedMask
from fedspa.core.records import Costs, saved_costs
from fedspa.core.saved import Misfit, Saved
from fedspa.core.server import ServerState
from fedspa.federated.client_runner import ClientRunner
from fedspa.federated.client_states import ClientStates, Held, saved_states
from fedspa.federated.scores import Kept, saved_scores


@dataclass
class FederationState:
    """The server, the clients, and what a run adds up. Its parts are replaced, never written into."""

    runner: ClientRunner
    initial: Initial
    server: ServerState
    round: int = 0
    """Completed rounds."""
    clients: ClientStates = field(default_factory=ClientStates)
    """The states of the clients with a completed update."""
    visits: dict[int, int] = field(default_factory=dict)
    """The completed updates of each client that has any."""
    costs: Costs = field(default_factory=Costs)
    dense_costs: Costs = field(default_factory=Costs)
    """What the same updates would have cost FedAvg."""
    events: dict[str, int] = field(default_factory=dict)
    """The number of events of each kind."""
    scores: Kept = field(default_factory=dict)
    """The latest ones."""
    changed: set[int] = field(default_factory=set)
    """The clients whose state has changed since personal models were tested last."""

    @classmethod
    def start(cls, runner: ClientRunner, initial: Initial, memory: float) -> FederationState:
        """The state before round 1. `memory`: bytes of clients' states kept in memory, the others go to a file."""
        return cls(runner, initial, runner.method.server_init(initial), clients=ClientStates(memory))

    @property
    def weights(self) -> torch.Tensor:
        """The dense global weights [total]."""
        return self.server.weights

    def draft(self) -> FederationState:
        """A state to work on, while this one stays as it is."""
        return replace(self, clients=self.clients.copy(), visits=dict(self.visits), changed=set(self.changed))

    def client_state(self, client: int) -> ClientState:
        """The state of a client; of a new one the state that its method starts from."""
        return self.clients[client] if client in self.clients else self._first_state(client)

    def held(self, client: int) -> Held:
        """The same; what lies in a file stays unread."""
        return self.clients.held(client) if client in self.clients else self._first_state(client)

    def mask(self, client: int) -> PackedMask:
        """A client's mask, of a method that keeps one."""
        mask = self.client_state(client).mask
        assert mask is not None
        return mask

    def density(self, client: int) -> float:
        """The share of the parameters that the client's mask keeps active; 1 where it has none."""
        mask, space = self.client_state(client).mask, self.runner.setup.space
        return 1.0 if mask is None else (mask.active - (space.total - space.trained)) / space.trained

    def densities(self) -> list[float]:
        """The density of each client with a completed update."""
        return [self.density(client) for client in self.clients]

    def remember(self, client: int, update: ClientUpdate) -> None:
        """Keep the state that a client's update left."""
        known = self.client_state(client)
        assert update.state is not None
        next_state = update.state.sharing(known)
        if next_state is not known or client not in self.clients:
            self.clients[client] = next_state
        self.visits[client] = self.visits.get(client, 0) + 1
        self.changed.add(client)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values, tensors and masks, for a checkpoint."""
        return {
            "weights": self.server.weights,
            "server": {"tensors": dict(self.server.tensors), "kept": dict(self.server.kept)},
            "round": self.round,
            "visits": self.visits,
            "events": self.events,
            "scores": {
                kind: {metric: [scores.clients, scores.values] for metric, scores in by_metric.items()}
                for kind, by_metric in self.scores.items()
            },
            "changed": sorted(self.changed),
            "costs": asdict(self.costs),
            "dense_costs": asdict(self.dense_costs),
            "clients": self.clients.at_rest(),
            # Clients who still share the first state go on sharing it with new ones.
            "first": dict(self._first_state(0)),
        }

    def loaded(
        self, state: dict[str, Any], clients: int, rounds: int, metrics: Iterable[str]
    ) -> FederationState:
        """The state that `state_dict` gave in another process, perhaps on another device.

        Args:
            clients: of the federation.
            rounds: of the whole run.
            metrics: that clients are scored by.

        Raises `Misfit` for a state that cannot be of this federation.
        """
        saved, like = Saved(state, "loop"), self.initial.weights
        done = saved["round"].integer(high=rounds)
        visits = {
            client.integer(high=clients - 1): number.integer(1, done)
            for client, number in saved["visits"].items()
        }
        if set(saved["clients"].mapping()) != set(visits):
            raise Misfit("loop.clients must be the clients of loop.visits")
        start = self.runner.method.server_init(self.initial)
        tensors = _saved_tensors(saved["server"]["tensors"], start.tensors)
        kept = _saved_tensors(saved["server"]["kept"], start.kept)
        weights = saved["weights"].tensor(like.dtype, like.shape).to(like.device)
        return FederationState(
            self.runner,
            self.initial,
            ServerState(weights, tensors, kept),
            round=done,
            clients=saved_states(saved, self._first_state(0), like, self.clients.memory),
            visits=visits,
            events={kind.text(): number.integer(1) for kind, number in saved["events"].items()},
            costs=saved_costs(saved["costs"]),
            dense_costs=saved_costs(saved["dense_costs"]),
            scores=saved_scores(saved["scores"], clients, self.runner.method.kinds, metrics),
            changed={client.integer(high=clients - 1) for client in saved["changed"].sequence()},
        )

    def _first_state(self, client: int) -> ClientState:
        return self.runner.first_state(client, self.initial)


def _saved_tensors(saved: Saved, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint that have these names, shapes and dtypes. Raises `Misfit`."""
    saved.mapping(like)
    return {
        name: saved[name].tensor(tensor.dtype, tensor.shape).to(tensor.device)
        for name, tensor in like.items()
    }
