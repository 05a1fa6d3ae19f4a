"""The state of a federation, which changes from round to round."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fedspa.core.client import ClientUpdate
from fedspa.core.client_state import MASK, ClientState, Item, StoredItem
from fedspa.core.packed_mask import PackedMask
from fedspa.core.records import Costs
from fedspa.core.server import ServerState
from fedspa.federated.client_runner import ClientRunner
from fedspa.federated.client_states import ClientStates
from fedspa.federated.exploration import EXPLORED, Exploration
from fedspa.federated.scores import ClientScores, Kept


@dataclass
class FederationState:
    """The server, the clients, and the sums of a run. Its parts are replaced, never changed in place."""

    runner: ClientRunner
    server: ServerState
    round: int = 0
    """The number of completed rounds."""
    clients: ClientStates = field(default_factory=ClientStates)
    """The states of the clients with a completed update."""
    local_models: ClientStates | None = None
    """With `save.local`: the weights of each of them after its last update, packed: those that are not zero (values),
    and their places (mask)."""
    updates: dict[int, int] = field(default_factory=dict)
    """The number of completed updates of each client that has any."""
    costs: Costs = field(default_factory=Costs)
    dense_costs: Costs = field(default_factory=Costs)
    """The costs of FedAvg for the same updates."""
    events: dict[str, int] = field(default_factory=dict)
    """The number of events of each kind."""
    scores: Kept = field(default_factory=dict)
    """The latest scores."""
    exploration: Exploration = field(default_factory=Exploration)
    """The explored parameters of the masks, for a method with a mask searcher."""
    changed: set[int] = field(default_factory=set)
    """The clients whose state has changed since the last test of personal models."""

    @classmethod
    def start(
        cls, runner: ClientRunner, memory: float = float("inf"), save_local: bool = False
    ) -> FederationState:
        """The state before round 1.

        Args:
            memory: the bytes of clients' states that stay in memory. The others go to a file.
            save_local: True to keep each client's local model, as `save.local`.
        """
        clients = ClientStates(memory)
        local_models = clients.copy() if save_local else None  # a copy shares the memory bound
        return cls(runner, runner.method.server_init(runner.setup.initial), 0, clients, local_models)

    @property
    def weights(self) -> torch.Tensor:
        """The dense global weights [total]."""
        return self.server.weights

    def draft(self) -> FederationState:
        """A copy to work on. This state does not change."""
        return replace(
            self,
            clients=self.clients.copy(),
            local_models=None if self.local_models is None else self.local_models.copy(),
            updates=dict(self.updates),
            changed=set(self.changed),
        )

    def client_state(self, client: int) -> ClientState:
        """The state of a client, on the device of the weights."""
        return self.stored_state(client).to(self.weights.device)

    def stored_state(self, client: int) -> ClientState:
        """The stored state of a client, perhaps in a file; for a new client the first state of the method."""
        return self.clients[client] if client in self.clients else self.runner.first_state(client)

    def mask(self, client: int) -> PackedMask:
        """A client's mask, for a method with masks."""
        mask = self.stored_state(client).mask
        assert mask is not None
        return mask

    def density(self, client: int) -> float:
        """The share of the parameters that are active in the client's model."""
        mask, space = self.server.mask or self.stored_state(client).mask, self.runner.setup.space
        if mask is None or not self.runner.method.mask_prunes:
            return 1.0
        return (mask.active - (space.total - space.trained)) / space.trained

    def densities(self) -> list[float]:
        """The density of each client with a completed update."""
        return [self.density(client) for client in self.clients]

    def items_kept(self) -> list[str]:
        """The names of all that clients with a completed update keep beside their masks, sorted."""
        return sorted({name for state in self.clients.values() for name in state} - {MASK})

    def remember(self, client: int, update: ClientUpdate) -> None:
        """Store the client's state after its update."""
        known = self.stored_state(client)
        assert update.state is not None
        state = self._explored(client, known, update.state) if self.runner.method.uses_mask else update.state
        next_state = state.sharing(known)
        if next_state is not known or client not in self.clients:
            self.clients[client] = next_state
        if self.local_models is not None:
            assert update.local is not None
            places = PackedMask.pack(update.local != 0).on_cpu()
            values = update.local[update.local != 0].cpu()
            self.local_models[client] = ClientState(values=values, mask=places)
        self.updates[client] = self.updates.get(client, 0) + 1
        self.changed.add(client)

    def _explored(self, client: int, known: ClientState, state: ClientState) -> ClientState:
        """A client's next state with its explored parameters, which are also counted."""
        new, mask = client not in self.updates, state.mask
        before = known.get(EXPLORED, known.mask)
        assert isinstance(before, PackedMask) and mask is not None
        if mask is known.mask and not new:  # nothing was explored
            return state if before is mask else state | {EXPLORED: before}
        # If this update finds the first mask, the client never trained with the dense mask before it.
        ever = mask if new and self.runner.method.finds_first_mask else before | mask
        self.exploration = self.exploration.noted(ever, None if new else before)
        return state if ever == mask else state | {EXPLORED: ever}

    def explored(self) -> dict[str, float]:
        """The shares of the parameters that were ever active; empty without a mask searcher."""
        space = self.runner.setup.space
        return self.exploration.shares(space.total, space.trained) if self.runner.method.uses_mask else {}

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values, tensors and masks, for a checkpoint."""
        return {
            "weights": self.server.weights,
            "server": {"tensors": dict(self.server.tensors), "kept": dict(self.server.kept)},
            "round": self.round,
            "updates": self.updates,
            "events": self.events,
            "scores": {
                kind: {metric: scores.tensors() for metric, scores in by_metric.items()}
                for kind, by_metric in self.scores.items()
            },
            "exploration": self.exploration.state_dict(),
            "changed": sorted(self.changed),
            "costs": asdict(self.costs),
            "dense_costs": asdict(self.dense_costs),
            "clients": self.clients,
            "local_models": self.local_models,
            # Clients that still share the first state keep sharing it with new ones.
            "first": dict(self.runner.first_state(0)),
        }

    def loaded(self, state: dict[str, Any]) -> FederationState:
        """The state that `state_dict` returned in another process, perhaps on another device.

        The clients' states are copied one by one, so that states beyond the memory bound are never in memory together.
        """
        device = self.weights.device
        tensors, kept = (
            {name: tensor.to(device, copy=True) for name, tensor in state["server"][part].items()}
            for part in ("tensors", "kept")
        )
        # By the id of an item in the file: its replacement here, so that clients keep sharing items.
        shared: dict[int, Item | StoredItem] = {
            id(state["first"][name]): item for name, item in self.runner.first_state(0).items()
        }

        def restored(
            states: ClientStates, stored: dict[str, dict[str, Item]], device: torch.device
        ) -> ClientStates:
            for client, items in stored.items():
                states[int(client)] = ClientState(
                    {
                        name: shared[id(item)] if id(item) in shared else item.clone()
                        for name, item in items.items()
                    }
                ).to(device)
                shared.update((id(items[name]), item) for name, item in states[int(client)].stored.items())
            return states

        clients, local_models = ClientStates(self.clients.memory), None
        if self.local_models is not None:
            local_models = restored(clients.copy(), state["local_models"], torch.device("cpu"))
        return FederationState(
            self.runner,
            ServerState(state["weights"].to(device, copy=True), tensors, kept),
            round=state["round"],
            clients=restored(clients, state["clients"], device),
            local_models=local_models,
            updates={int(client): number for client, number in state["updates"].items()},
            events=state["events"],
            costs=Costs(**state["costs"]),
            dense_costs=Costs(**state["dense_costs"]),
            scores={
                kind: {metric: ClientScores.of(*tensors) for metric, tensors in by_metric.items()}
                for kind, by_metric in state["scores"].items()
            },
            exploration=Exploration.loaded(state["exploration"]),
            changed=set(state["changed"]),
        )
