"""FedMD (Li and Wang, 2019): clients share their models' outputs on public rows, and never their weights.

In its first update a client trains on the public rows with their labels, and then on its own (transfer learning). In
each later update it trains towards the consensus (digest), and then on its own rows (revisit). The consensus is the
mean of the outputs that the last participants sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from fedspa.core.client import Client, ClientUpdate, Initial
from fedspa.core.client_state import ClientState
from fedspa.core.limits import limited
from fedspa.core.server import Aggregate, ServerState
from fedspa.data.examples import Batch
from fedspa.methods.base import PersonalMethod
from fedspa.training.local_training import LocalTraining


class Digest(LocalTraining):
    """Trains towards the further tensor "consensus" [rows, outputs] by the mean absolute error, if there is one."""

    def training_step(self, batch: Batch, batch_idx: int = 0) -> torch.Tensor:
        if not self.others:
            return super().training_step(batch, batch_idx)
        assert self.task is not None and batch.rows is not None
        places = torch.searchsorted(self.task.rows.to(batch.rows.device), batch.rows)
        return nn.functional.l1_loss(self.network(batch.inputs), self.others["consensus"][places])


@dataclass(kw_only=True)
class FedMD(PersonalMethod):
    """FedMD. Each client trains a model of its own; all start from w_0."""

    weighting: str = "uniform"
    normaliser: ClassVar[str] = "participants"  # type: ignore[misc]  # no weights are merged: not a setting
    public_epochs: int = limited(5, low=0)
    """Epochs on the labelled public rows in a client's first update."""
    digest_epochs: int = limited(1, low=0)
    """Epochs towards the consensus in each later update. Those on the client's rows are training.epochs."""

    training_class = Digest
    sends_weights: ClassVar[bool] = False
    needs_public: ClassVar[bool] = True

    def server_init(self, initial: Initial) -> ServerState:
        return ServerState(initial.weights, {"consensus": initial.weights.new_zeros(initial.public)})

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        epochs, others = self.digest_epochs, {"consensus": server["consensus"]}
        if client.first:  # transfer learning
            epochs, others = self.public_epochs, {}
        start, order = client.state.tensor("weights"), client.generator("public_batches")
        taught = client.train(start, epochs=epochs, public=True, others=others, batches=order)
        trained = client.train(taught.weights)
        return ClientUpdate(
            update=None,
            tensors={"outputs": client.outputs(trained.weights)},
            state=ClientState(weights=trained.weights),
            local=trained.weights,
        )

    def server_update(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        return replace(server, tensors={"consensus": aggregate.tensors["outputs"]})
