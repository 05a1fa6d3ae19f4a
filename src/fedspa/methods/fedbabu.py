"""FedBABU (Oh et al., 2022): clients train the body alone. The head keeps its initial values until fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedspa.core.client import Client, ClientUpdate
from fedspa.core.server import ServerState
from fedspa.methods.fedavg import FedAvg


@dataclass(kw_only=True)
class FedBABU(FedAvg):
    """FedBABU. `personal_layers` chooses the head. Nobody trains it, so it need not travel. `finetune.epochs` trains
    body and head of every client at the end of the run."""

    needs_personal_layers: ClassVar[bool] = True

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        trained = client.train(client.weights, trainable="shared")
        return ClientUpdate(update=client.weights - trained.weights, local=trained.weights)
