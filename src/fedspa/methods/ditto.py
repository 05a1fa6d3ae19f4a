"""Ditto (Li et al., 2021): a shared model trained as in FedAvg, and a personal one pulled towards it.

Some of an update's epochs train the shared branch, which starts from w_t and is merged. The others train the
client's v_k: after each SGD step v <- v - lr * proximal * (v - w_t). Clients that do not take
part keep a stale v_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedspa.core.client import Client, ClientUpdate, Proximal
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.limits import limited
from fedspa.core.server import ServerState
from fedspa.core.settings import TrainingSettings
from fedspa.methods.base import PersonalMethod


@dataclass(kw_only=True)
class Ditto(PersonalMethod):
    """Ditto. The personal model is v_k; the local model is the shared branch after the client's epochs."""

    normaliser: ClassVar[str] = "participants"  # type: ignore[misc]  # all hold every coordinate: not a setting
    shared_epochs: int = limited(2, low=0)
    """Epochs of the shared branch. Together with the personal epochs they must equal training.epochs."""
    personal_epochs: int = limited(3, low=0)
    proximal: float = limited(0.5, low=0)
    """lambda: the strength of the pull towards the round's starting weights."""

    trains_personal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_epochs + self.personal_epochs == 0:
            raise UserError(
                "method.shared_epochs and method.personal_epochs are both 0: one must be at least 1."
            )

    def check_training(self, training: TrainingSettings) -> None:
        epochs = self.shared_epochs + self.personal_epochs
        if training.epochs != epochs:
            raise UserError(
                f"training.epochs={training.epochs} is not what method.shared_epochs={self.shared_epochs} and "
                f"method.personal_epochs={self.personal_epochs} add up to: it must be {epochs}, or they must change."
            )

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        shared = client.train(
            client.weights, epochs=self.shared_epochs, batches=client.generator("shared_batches")
        )
        personal = client.train(
            client.state.tensor("weights"),
            epochs=self.personal_epochs,
            proximal=Proximal(client.weights, self.proximal),
            personal=True,
        )
        return ClientUpdate(
            update=client.weights - shared.weights,
            state=ClientState(weights=personal.weights),
            local=shared.weights,
        )
