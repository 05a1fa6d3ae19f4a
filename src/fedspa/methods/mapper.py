"""MAPPER (Mansour et al., 2020): each client mixes the outputs of a shared and a local model, and chooses the shares.

For each share s a client trains its local model v for the loss of s f(v) + (1 - s) f(w), where w stays. It keeps the v
and the s of least loss, and then trains w for the loss of that mixture, where v stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.func import functional_call

from fedspa.core.client import Client, ClientUpdate, Initial, Mixture, Trained
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.limits import limited
from fedspa.core.server import ServerState
from fedspa.data.examples import Batch
from fedspa.methods.fedavg import FedAvg
from fedspa.training.local_training import LocalTraining


class HalfMixture(LocalTraining):
    """Trains the network in a mixture. The tensor "other" [total] stays; "share" [1] is the network's share."""

    def training_step(self, batch: Batch, batch_idx: int = 0) -> torch.Tensor:
        outputs = self.network(batch.inputs)
        if self.others:  # not in fine-tuning
            other = dict(self.space.items(self.others["other"]))
            share = self.others["share"]
            outputs = share * outputs + (1 - share) * functional_call(self.network, other, (batch.inputs,))
        return self.objective.loss(outputs, batch.targets)


@dataclass(kw_only=True)
class MAPPER(FedAvg):
    """MAPPER. The deciding loss is the mean over a local training. A client without an update has the global model."""

    weighting: str = "uniform"
    shares: list[float] = limited([0.25, 0.5, 0.75], low=0, high=1, low_open=True)
    """The shares of the local model to try. Each one costs local_epochs."""
    local_epochs: int = limited(1, low=1)
    """Epochs of the local model for each share. The shared model takes training.epochs."""

    training_class = HalfMixture

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shares:
            raise UserError("method.shares is empty: use method.shares=[0.25,0.5,0.75].")

    def client_init(self, client: int, initial: Initial) -> ClientState:
        """v starts at w_0."""
        return ClientState(personal=initial.weights)

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        w, v = client.weights, client.state.tensor("personal")
        tried = [self._trained(client, v, w, share, self.local_epochs) for share in self.shares]
        best = int(client.read(torch.stack([trained.loss for trained in tried]).argmin()))
        v, share = tried[best].weights, self.shares[best]
        trained = self._trained(client, w, v, 1 - share, client.training.epochs)
        return ClientUpdate(
            update=w - trained.weights,
            state=ClientState(personal=v, share=w.new_full((1,), share)),
            local=trained.weights,
        )

    @staticmethod
    def _trained(
        client: Client, weights: torch.Tensor, other: torch.Tensor, share: float, epochs: int
    ) -> Trained:
        """Train weights [total] in a mixture with this share; `other` [total] has the rest."""
        others = {"other": other, "share": weights.new_full((1,), share)}
        return client.train(weights, epochs=epochs, others=others, further_passes=1)

    def personal(self, weights: torch.Tensor, state: ClientState) -> torch.Tensor | Mixture:
        if "share" not in state:
            return weights
        return Mixture(state.tensor("personal"), weights, float(state.tensor("share")))
