"""Sub-FedAvg (Vahidian et al., 2021), unstructured: clients start dense and prune their own sub-network.

After the first and after the last local epoch the client marks the smallest `prune_rate` of the active
weights of each tensor of two or more dimensions. It adopts the second of these masks if three conditions
are met: the two masks still differ, the client is denser than the target, and the pruned model is accurate.
The original measures the accuracy on test data; here it is measured on the client's training data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedspa.core.client import Client, ClientUpdate
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.limits import limited
from fedspa.core.packed_mask import PackedMask
from fedspa.core.server import ServerState
from fedspa.core.settings import TrainingSettings
from fedspa.masks.magnitude import pruned
from fedspa.methods.pruning import PruningMethod

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class SubFedAvg(PruningMethod):
    """Sub-FedAvg. Each coordinate is averaged over the clients whose newly adopted mask has it. A client at or above
    `sparsity` prunes no more. The pruned model must be accurate."""

    normaliser: str = "holders"
    prune_rate: float = 0.05
    distance_threshold: float = limited(1e-4, low=0)
    """The least mean Hamming distance between the two candidate masks."""
    accuracy_threshold: float = 0.5

    def check_training(self, training: TrainingSettings) -> None:
        if training.epochs < 2:
            raise UserError(
                f"training.epochs={training.epochs} leaves method={self.name} nothing to compare: it prunes where "
                "the masks after the first and the last epoch differ, so it must be at least 2."
            )

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        mask, batches = client.mask, client.generator("batches")
        start = mask * client.weights
        first = client.train(start, epochs=1, mask=mask, batches=batches)
        epochs = client.training.epochs - 1
        last = client.train(first.weights, epochs=epochs, mask=mask, batches=batches)
        with client.timed("search"):
            early, late = (
                pruned(client.space, mask, client.count(mask), trained.weights, self.prune_rate)
                for trained in (first, last)
            )
        adopted = self._adopts(client, early, late, last.weights)
        next_mask = late if adopted else mask
        return ClientUpdate(
            update=next_mask * (start - last.weights),
            mask=next_mask,
            state=ClientState(mask=PackedMask.pack(next_mask)) if adopted else None,
            local=last.weights,
        )

    def _adopts(self, client: Client, early: torch.Tensor, late: torch.Tensor, weights: torch.Tensor) -> bool:
        """True if the client adopts the mask `late` [total] for its trained `weights` [total]."""
        with client.timed("search"):
            distance = float(client.read((early != late).float().mean()))
        if distance <= self.distance_threshold or not self.too_dense(client):
            return False
        return client.accuracy(late * weights, mask=late) > self.accuracy_threshold
