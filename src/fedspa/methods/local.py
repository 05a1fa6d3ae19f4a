"""Local: every client trains its own model from the same start, and sends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedspa.core.client import Client, ClientUpdate, Initial
from fedspa.core.client_state import ClientState
from fedspa.core.server import ServerState
from fedspa.methods.base import Method


@dataclass(kw_only=True)
class Local(Method):
    """Local training. Only sampled clients train; there is no global model and no traffic."""

    weighting: ClassVar[str] = "uniform"  # type: ignore[misc]  # nothing is merged: not a setting
    normaliser: ClassVar[str] = "participants"  # type: ignore[misc]
    sends: ClassVar[bool] = False

    def client_init(self, client: int, initial: Initial) -> ClientState:
        return ClientState(weights=initial.weights)

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        trained = client.train(client.state.tensor("weights"))
        state = ClientState(weights=trained.weights)
        return ClientUpdate(update=None, state=state, local=trained.weights)
