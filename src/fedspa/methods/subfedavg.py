"""Sub-FedAvg (Vahidian et al., 2021), unstructured: clients start dense and prune their own sub-network.

After the first and after the last local epoch the client marks the smallest `prune_rate` of the active
weights of each tensor of two or more dimensions. It adopts the second of these masks if the two still
differ (its sub-network has not settled), if it is denser than the target, and if the pruned model is still
good. The original judges that on test data; here it is the client's own training data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedspa.core.client import Client, ClientUpdate, Initial, Proximal
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError, check_range
from fedspa.core.packed_mask import PackedMask
from fedspa.core.server import ServerState
from fedspa.core.settings import TrainingSettings
from fedspa.masks.select import smallest
from fedspa.methods.base import Method


@dataclass(kw_only=True)
class SubFedAvg(Method):
    """Each coordinate is averaged over the clients whose just adopted mask holds it."""

    weighting: str = "uniform"
    normaliser: str = "holders"
    sparsity: float = 0.5
    """Where pruning ends: a client at or above it prunes no more. Tensors of one dimension do not count."""
    prune_rate: float = 0.05
    """Share of a tensor's active weights that one adoption prunes."""
    distance_threshold: float = 1e-4
    """Least mean Hamming distance between the two candidate masks."""
    accuracy_threshold: float = 0.5
    """Least accuracy, in [0, 1], of the pruned model on the client's training data."""

    kinds: ClassVar[tuple[str, ...]] = ("global", "personal", "local")
    uses_sparsity: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.sparsity", self.sparsity, low=0, high=1, high_open=True)
        check_range("method.prune_rate", self.prune_rate, low=0, high=1)
        check_range("method.distance_threshold", self.distance_threshold, low=0)
        check_range("method.accuracy_threshold", self.accuracy_threshold, low=0, high=1)

    def check_training(self, training: TrainingSettings) -> None:
        if training.epochs < 2:
            raise UserError(
                f"training.epochs={training.epochs} leaves method={self.name} nothing to compare: it prunes where "
                "the masks after the first and the last epoch differ, so it must be at least 2."
            )

    def client_init(self, client: int, initial: Initial) -> ClientState:
        return ClientState(mask=initial.full_mask)

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        mask, batches = client.mask, client.generator("batches")
        start = mask * client.weights
        first = last = client.train(start, epochs=1, mask=mask, batches=batches)
        if client.training.epochs > 1:
            epochs = client.training.epochs - 1
            proximal = Proximal(start, client.training.proximal) if client.training.proximal else None
            last = client.train(first.weights, epochs=epochs, mask=mask, proximal=proximal, batches=batches)
        with client.timed("search"):
            early, late = self._pruned(client, first.weights), self._pruned(client, last.weights)
        adopted = self._adopts(client, early, late, last.weights)
        next_mask = late if adopted else mask
        return ClientUpdate(
            update=next_mask * (start - last.weights),
            mask=next_mask,
            state=ClientState(mask=PackedMask.pack(next_mask)) if adopted else None,
            local=last.weights,
        )

    def _pruned(self, client: Client, weights: torch.Tensor) -> torch.Tensor:
        """The mask [total] without the smallest active weights of each tensor of two or more dimensions."""
        space, mask, pieces = client.space, client.mask, []
        vectors = space.split(mask), space.split(weights)
        for shape, held, active, weight in zip(space.shapes, client.count(mask), *vectors, strict=True):
            if len(shape) > 1:
                # The small slack keeps 0.29 x 100, which is 28.999999999999996 in binary, at 29.
                count = math.floor(self.prune_rate * held + 1e-9)
                dropped = smallest(weight.abs().masked_fill(active == 0, torch.inf), count)
                active = active.masked_fill(dropped, 0)
            pieces.append(active)
        return torch.cat(pieces)

    def _adopts(self, client: Client, early: torch.Tensor, late: torch.Tensor, weights: torch.Tensor) -> bool:
        """Whether the client adopts the mask `late` [total] for its trained `weights` [total]."""
        with client.timed("search"):
            distance = float((early != late).float().mean())
        if distance <= self.distance_threshold or self._pruned_share(client) >= self.sparsity:
            return False
        return client.accuracy(late * weights, mask=late) > self.accuracy_threshold

    @staticmethod
    def _pruned_share(client: Client) -> float:
        """Inactive share of the tensors of two or more dimensions."""
        space = client.space
        counted = [
            (size - held, size)
            for shape, size, held in zip(space.shapes, space.sizes, client.count(client.mask), strict=True)
            if len(shape) > 1
        ]
        return sum(pruned for pruned, _ in counted) / sum(size for _, size in counted)

    def personal(self, weights: torch.Tensor, state: ClientState) -> torch.Tensor:
        """m_{k,t+1} * w_{t+1}."""
        assert state.mask is not None
        return state.mask.unpack(like=weights) * weights
