"""FedALA (Zhang et al., 2023): each client learns a mixture of the new global head and its last local model.

A client starts from old + (new - old) W. W is 1 below its `layers` last tensors. In them W is learned before each
training by steps W <- clip(W - rate g (new - old), 0, 1), where g is the gradient of one mini-batch at the mixture.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspa.core.client import Client, ClientUpdate, Initial
from fedspa.core.client_state import ClientState
from fedspa.core.limits import limited
from fedspa.core.server import ServerState
from fedspa.methods.fedavg import FedAvg


@dataclass(kw_only=True)
class FedALA(FedAvg):
    """FedALA. The personal model mixes the newest global weights by the W of the client's last update."""

    layers: int = limited(2, low=1)
    """The number of the model's last parameter tensors that are mixed."""
    rate: float = limited(1.0, low=0, low_open=True)
    first_steps: int = limited(10, low=0)
    """Steps of W in a client's first update."""
    steps: int = limited(1, low=0)
    """Steps of W in each later update."""

    def client_init(self, client: int, initial: Initial) -> ClientState:
        return ClientState(weights=initial.weights)

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        mixing = self._learned(client)
        trained = client.train(torch.lerp(client.state.tensor("weights"), client.weights, mixing))
        return ClientUpdate(
            update=client.weights - trained.weights,
            state=ClientState(weights=trained.weights, mixing=mixing),
            local=trained.weights,
        )

    def _learned(self, client: Client) -> torch.Tensor:
        """Learn the mixing weights W [total]."""
        state, new = client.state, client.weights
        old = state.tensor("weights")
        top = torch.zeros_like(new)
        top[sum(client.space.parameters.sizes[: -self.layers]) : client.space.trained] = 1
        mixing = state.tensor("mixing") if "mixing" in state else torch.ones_like(new)
        for step in range(self.first_steps if client.first else self.steps):
            gradient = client.gradient(torch.lerp(old, new, mixing), f"mixing_{step}")
            mixing = (mixing - self.rate * top * gradient * (new - old)).clamp(0, 1)
        return mixing

    def personal(self, weights: torch.Tensor, state: ClientState) -> torch.Tensor:
        if "mixing" not in state:
            return weights
        return torch.lerp(state.tensor("weights"), weights, state.tensor("mixing"))
