"""The server's side of a round: what it sends to each participant, and how it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedspa.core.errors import UserError
from fedspa.core.server import Aggregate, ServerState
from fedspa.core.weights import all_finite
from fedspa.federated.aggregation import Aggregator
from fedspa.federated.client import ClientSetup
from fedspa.federated.faults import Fault
from fedspa.federated.jobs import UpdateJob
from fedspa.federated.state import FederationState
from fedspa.methods.base import Method
from fedspa.methods.checking import check_server


@dataclass(frozen=True)
class Server:
    """Asks the method, and checks its answers."""

    method: Method
    setup: ClientSetup
    clients: int
    """Of the whole federation."""

    def job(self, state: FederationState, client: int, fault: Fault | None) -> UpdateJob:
        """A participant's part in the next round, with the message that it is sent."""
        message = self.method.message(state.server, client, state.client_state)
        return UpdateJob(
            state.round,
            client,
            first=client not in state.visits,
            state=state.held(client),
            fault=fault,
            message=None if message is state.server else message,
        )

    def weight(self, client: int) -> float:
        """a_k of a client, up to the normalisation."""
        return self.method.weight(len(self.setup.client_rows[client]))

    def aggregator(self) -> Aggregator:
        """An empty one, for a round."""
        return Aggregator(self.method.normaliser, self.clients, self.setup.space.trained)

    def update(self, server: ServerState, aggregator: Aggregator, round: int) -> ServerState:
        """The server after a round (from 1)."""
        return self._moved(server, aggregator, self.method.server_update, round)

    def prepare(self, server: ServerState, aggregator: Aggregator) -> ServerState:
        """The server after the step before round 1."""
        return self._moved(server, aggregator, self.method.server_prepare, round=1)

    def _moved(
        self,
        server: ServerState,
        aggregator: Aggregator,
        move: Callable[[ServerState, Aggregate], ServerState],
        round: int,
    ) -> ServerState:
        """The server after a step of the method; as before where no client sent anything.

        Raises `UserError` where updates, each of them finite, were too large for a sum.
        """
        aggregate = aggregator.result()
        if aggregate is None:
            return server
        moved = check_server(self.method, move(server, aggregate), server)
        tensors = (moved.weights, *moved.tensors.values(), *moved.kept.values())
        if all(all_finite(tensor.flatten()) for tensor in tensors):
            return moved
        raise UserError(
            f"The global weights of round {round} are not finite: the updates were too large to be added up; lower "
            "training.lr, or bound the updates with faults.norm_bound."
        )
