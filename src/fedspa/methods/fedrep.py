"""FedRep (Collins et al., 2021): clients first train their own head on the shared body, then the body under it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedspa.core.client import Client, ClientUpdate
from fedspa.core.errors import UserError
from fedspa.core.limits import limited
from fedspa.core.server import ServerState
from fedspa.core.settings import TrainingSettings
from fedspa.methods.fedavg import FedAvg


@dataclass(kw_only=True)
class FedRep(FedAvg):
    """FedRep. The head is given by `personal_layers`. The last epochs train the body, all others the head."""

    weighting: str = "uniform"
    body_epochs: int = limited(1, low=1)
    needs_personal_layers: ClassVar[bool] = True

    def check_training(self, training: TrainingSettings) -> None:
        if training.epochs <= self.body_epochs:
            raise UserError(
                f"training.epochs={training.epochs} leaves the head no epoch beside method.body_epochs="
                f"{self.body_epochs}: use training.epochs={self.body_epochs + 1} at least."
            )

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        batches, epochs = client.generator("batches"), client.training.epochs
        head = client.train(
            client.weights, epochs=epochs - self.body_epochs, trainable="personal", batches=batches
        )
        body = client.train(head.weights, epochs=self.body_epochs, trainable="shared", batches=batches)
        return ClientUpdate(update=client.weights - body.weights, local=body.weights)
