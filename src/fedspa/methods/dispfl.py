"""DisPFL (Dai et al., 2022): sparse personal models without a server. Clients receive models from random neighbours.

A client averages its weights and its neighbours', each weight over the models whose mask has it. It trains under its
mask, and then searches for its next mask. A grown weight is 0 until a neighbour with this weight gives it a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedspa.core.client import Client, ClientUpdate, Initial, Peers
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.limits import limited
from fedspa.core.server import ServerState
from fedspa.masks.base import MaskSearcher
from fedspa.methods.base import MaskedMethod, PersonalMethod


@dataclass(kw_only=True)
class DisPFL(MaskedMethod, PersonalMethod):
    """DisPFL. Each neighbour's values and mask travel to the client, and are charged once, to the receiver."""

    weighting: ClassVar[str] = "uniform"  # type: ignore[misc]  # nothing is sent to a server: not a setting
    normaliser: ClassVar[str] = "participants"  # type: ignore[misc]
    neighbours: int = limited(10, low=1)
    """The number of other clients that a client receives from, drawn anew for each update."""

    moves_weights: ClassVar[bool] = True

    @property
    def kinds(self) -> tuple[str, ...]:
        """There is no server with a global model."""
        return "personal", "local"

    def check_mask(self, searcher: MaskSearcher) -> None:
        if searcher.searches_first or not searcher.is_fixed:
            raise UserError(
                f"method={self.name} starts from random masks: use mask=dst or another such searcher."
            )
        if searcher.receives_dense(0):
            raise UserError(
                f"method={self.name} has no server with dense weights, which mask.regrow=gradient of "
                f"mask={searcher.name} needs: use mask.regrow=rolling or random."
            )

    def check_clients(self, clients: int) -> None:
        if self.neighbours >= clients:
            remedy = (
                f"method.neighbours={clients - 1} at most" if clients > 1 else "federation.clients=2 at least"
            )
            raise UserError(
                f"method.neighbours={self.neighbours} is more than a client of federation.clients={clients} has: use "
                f"{remedy}."
            )

    def client_init(self, client: int, initial: Initial) -> ClientState:
        mask = initial.mask(client)
        return ClientState(mask=mask, weights=mask.unpack(like=initial.weights) * initial.weights)

    def server_init(self, initial: Initial) -> ServerState:
        return ServerState(initial.weights, neighbours=self.neighbours)

    def message(self, server: ServerState, client: int, peers: Peers) -> ServerState:
        """The mean of the weights of the client and its neighbours, each weight over the models whose mask has it."""
        others = torch.randperm(peers.clients - 1, generator=peers.generator)[: self.neighbours]
        total, models = torch.zeros_like(server.weights), torch.zeros_like(server.weights)
        for other in (client, *((others + (others >= client)).sort().values.tolist())):
            state = peers.state_of(other)
            assert state.mask is not None
            total += state.tensor("weights")
            models += state.mask.unpack(like=models)
        return ServerState(total / models.clamp(min=1), neighbours=self.neighbours)

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        start = self.searcher.start(client.weights, client.mask, client.state)
        trained = client.train(start, mask=client.mask)
        state = self.searcher.next_state(client, start, trained)
        assert state.mask is not None
        weights = state.mask.unpack(like=trained.weights) * trained.weights
        return ClientUpdate(update=None, state=state | {"weights": weights}, local=trained.weights)
