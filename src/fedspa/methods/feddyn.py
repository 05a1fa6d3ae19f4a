"""FedDyn (Acar et al., 2021): each client's loss is corrected so that its minimum becomes that of the mean loss.

Client k minimises f_k(v) - <g_k, v> + alpha / 2 |v - w|^2, and then g_k <- g_k - alpha (v - w). The server keeps
h <- h - alpha / N sum(v - w) over the participants, of N clients in all, and w <- mean(v) - h / alpha.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedspa.core.client import Client, ClientUpdate, Initial, Proximal
from fedspa.core.client_state import ClientState
from fedspa.core.limits import limited
from fedspa.core.server import Aggregate, ServerState
from fedspa.methods.fedavg import FedAvg


@dataclass(kw_only=True)
class FedDyn(FedAvg):
    """FedDyn. Only weights and updates travel: g_k stays with the client, h with the server.

    The quadratic term pulls after each step, as `Proximal` does. In the paper it is part of the gradient.
    """

    weighting: ClassVar[str] = "uniform"  # type: ignore[misc]  # all clients count alike in h: not a setting
    alpha: float = limited(0.01, low=0, low_open=True)
    moves_weights: ClassVar[bool] = True
    own_proximal: ClassVar[str] = "method.alpha"

    def client_init(self, client: int, initial: Initial) -> ClientState:
        return ClientState(gradient=initial.weights.new_zeros(len(initial.weights)))

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        gradient, proximal = client.state.tensor("gradient"), Proximal(client.weights, self.alpha)
        trained = client.train(client.weights, correction=-gradient, proximal=proximal)
        update = client.weights - trained.weights
        state = ClientState(gradient=gradient + self.alpha * update)
        return ClientUpdate(update=update, state=state, local=trained.weights)

    def server_init(self, initial: Initial) -> ServerState:
        return ServerState(initial.weights, kept={"h": initial.weights.new_zeros(len(initial.weights))})

    def server_update(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        update = aggregate.update
        assert update is not None
        h = server.kept["h"] + self.alpha * aggregate.participation * update
        h[aggregate.space.trained :] = 0  # running statistics have no gradient
        return replace(server, weights=server.weights - update - h / self.alpha, kept={"h": h})
