"""SCAFFOLD (Karimireddy et al., 2020), option II: control variates correct the steps of the clients.

Each step of client k is y <- y - lr (g - c_k + c). After K steps c_k becomes c_k - c + (x - y) / (K lr). K is the
number of steps that the client really took.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedspa.core.client import Client, ClientUpdate, Initial
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.server import Aggregate, ServerState
from fedspa.core.settings import TrainingSettings
from fedspa.methods.fedavg import FedAvg


@dataclass(kw_only=True)
class Scaffold(FedAvg):
    """SCAFFOLD. c travels down with the weights, and the change of c_k travels up with the update."""

    label: ClassVar[str] = "SCAFFOLD"
    weighting: ClassVar[str] = "uniform"  # type: ignore[misc]  # c is the plain mean of the c_k: not a setting

    def check_training(self, training: TrainingSettings) -> None:
        """Refuse other steps than plain SGD: only then (x - y) / (K lr) is the mean gradient."""
        for name, plain in (("optimizer", "sgd"), ("momentum", 0), ("proximal", 0)):
            if (value := getattr(training, name)) != plain:
                raise UserError(
                    f"training.{name}={value} does not go with method={self.name}, which needs plain steps of SGD: use "
                    f"training.{name}={plain}."
                )

    def client_init(self, client: int, initial: Initial) -> ClientState:
        return ClientState(control=initial.weights.new_zeros(len(initial.weights)))

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        own_control, control = client.state.tensor("control"), server["control"]
        trained = client.train(client.weights, correction=control - own_control)
        update = client.weights - trained.weights  # x - y
        change = update / (trained.steps * client.training.lr_at(client.round)) - control  # c_k^+ - c_k
        return ClientUpdate(
            update=update,
            tensors={"control": change},
            state=ClientState(control=own_control + change),
            local=trained.weights,
        )

    def server_init(self, initial: Initial) -> ServerState:
        zeros = initial.weights.new_zeros(len(initial.weights))
        return replace(super().server_init(initial), tensors={"control": zeros})

    def server_update(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """x by the server optimizer, whose lr is eta_g; c <- c + |S| / N mean(c_k^+ - c_k)."""
        control = server["control"] + aggregate.participation * aggregate.tensors["control"]
        return replace(super().server_update(server, aggregate), tensors={"control": control})
