"""FedAvg (McMahan et al., 2017): every client trains the whole dense model; the dense rival of FedSpa."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedspa.core.client import Client, ClientUpdate
from fedspa.core.server import ServerState
from fedspa.methods.base import Method


@dataclass(kw_only=True)
class FedAvg(Method):
    """FedAvg. The local model is the global weights after a client's epochs; compare FedSpa with this one."""

    normaliser: ClassVar[str] = "participants"  # type: ignore[misc]  # all hold every coordinate: not a setting

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        trained = client.train(client.weights)
        return ClientUpdate(update=client.weights - trained.weights, local=trained.weights)
