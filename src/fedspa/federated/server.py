"""The server's side of a round: the message to each participant, and the update of the server's state."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from fedspa.core.client import Peers
from fedspa.core.errors import UserError
from fedspa.core.randomness import generator
from fedspa.core.read_only import read_only
from fedspa.core.server import ServerState
from fedspa.core.weights import all_finite
from fedspa.federated.aggregation import Aggregator
from fedspa.federated.client_setup import ClientSetup
from fedspa.federated.faults import Fault
from fedspa.federated.jobs import UpdateJob
from fedspa.federated.state import FederationState
from fedspa.methods.base import Method
from fedspa.methods.checking import check_server, title


@dataclass(frozen=True)
class Server:
    """Calls the method's server functions, and checks their results."""

    method: Method
    setup: ClientSetup
    clients: int
    """The number of clients of the whole federation."""

    def job(self, state: FederationState, client: int, fault: Fault | None) -> UpdateJob:
        """The job of a participant in the next round, with the message to it."""
        source = generator(self.setup.seed, "message", state.round, client)
        peers = Peers(self.clients, state.client_state, source)
        with self._read_only(state.server):
            message = self.method.message(state.server, client, peers)
        return UpdateJob(
            state.round,
            client,
            first=client not in state.updates,
            state=state.stored_state(client),
            fault=fault,
            message=None if message is state.server else message,
        )

    def weight(self, client: int) -> float:
        """The weight a_k of a client, before the normalisation."""
        return self.method.weight(len(self.setup.client_rows[client]))

    def aggregator(self) -> Aggregator:
        """An empty aggregator for a round."""
        return Aggregator(self.method.normaliser, self.clients, self.setup.space)

    def step(self, server: ServerState, aggregator: Aggregator, round: int) -> ServerState:
        """The server's state after a round (from 1), or after the step before round 1 (0).

        It is unchanged if no client sent anything. Raises `UserError` if finite updates were too large for their sum.
        """
        if (aggregate := aggregator.result()) is None:
            return server
        step = self.method.server_update if round else self.method.server_prepare
        with self._read_only(server):
            moved = step(server, aggregate)
        check_server(self.method, moved, server)
        tensors = (moved.weights, *moved.tensors.values(), *moved.kept.values())
        if all(all_finite(tensor.flatten()) for tensor in tensors):
            return moved
        raise UserError(
            f"The global weights of round {max(round, 1)} are not finite: the updates were too large to be added up; "
            "lower training.lr, or bound the updates with faults.norm_bound."
        )

    def _read_only(self, server: ServerState) -> AbstractContextManager[None]:
        given = {f"server.{name}": getattr(server, name) for name in ("weights", "tensors", "kept")}
        return read_only(title(self.method), given)
