"""L2GD (Hanzely and Richtarik, 2020): every client has its own model, which is pulled toward the mean of all models.

The paper throws a coin: with probability p all clients take an averaging step x_k <- x_k - a (x_k - mean), where
a = alpha lambda / (n p), else a step of SGD. Here each update is one averaging step, and then local training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedspa.core.client import Client, ClientUpdate
from fedspa.core.client_state import ClientState
from fedspa.core.limits import limited
from fedspa.core.server import Aggregate, ServerState
from fedspa.methods.base import PersonalMethod
from fedspa.methods.fedavg import FedAvg


@dataclass(kw_only=True)
class L2GD(FedAvg, PersonalMethod):
    """The server's weights are the mean over all clients, those that never took part included."""

    weighting: ClassVar[str] = "uniform"  # type: ignore[misc]  # the plain mean: not a setting
    averaging: float = limited(0.5, low=0, high=1)
    """a: with 0 each client trains alone, with 1 all start from the mean."""

    moves_weights: ClassVar[bool] = True

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        personal = client.state.tensor("weights")
        trained = client.train(torch.lerp(personal, client.weights, self.averaging))
        return ClientUpdate(
            update=personal - trained.weights,
            state=ClientState(weights=trained.weights),
            local=trained.weights,
        )

    def server_update(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """The mean of all clients moves by the share of the clients that took part."""
        assert aggregate.update is not None
        return replace(server, weights=server.weights - aggregate.participation * aggregate.update)
