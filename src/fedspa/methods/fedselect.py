"""FedSelect (Tamirisa et al., 2024): each client personalises the single weights that its training moves most.

An epoch is a pass over the personal weights and one over the shared ones. In every `every`-th round the shared weights
of each tensor that moved most since the update began become personal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedspa.core.client import Client, ClientUpdate, Initial
from fedspa.core.client_state import MASK, ClientState
from fedspa.core.limits import limited
from fedspa.core.packed_mask import PackedMask
from fedspa.core.server import ServerState
from fedspa.masks.select import largest, whole
from fedspa.methods.base import Method


@dataclass(kw_only=True)
class FedSelect(Method):
    """FedSelect. The mask of a client's state marks the shared weights. Only these travel. No weight is ever pruned."""

    weighting: str = "uniform"
    normaliser: ClassVar[str] = "holders"  # type: ignore[misc]  # part of the method: not a setting
    every: int = limited(3, low=1)
    """The number of rounds from one personalisation to the next."""
    rate: float = limited(0.25, low=0, high=1)
    """The share of a tensor's shared weights that one personalisation takes."""
    most: float = limited(0.8, low=0, high=1)
    """The largest share of a tensor's weights that may be personal."""

    starts_dense: ClassVar[bool] = True
    mask_prunes: ClassVar[bool] = False

    def client_init(self, client: int, initial: Initial) -> ClientState:
        return ClientState(mask=initial.full_mask, weights=initial.weights)

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        shared, batches = client.mask, client.generator("batches")
        weights = start = torch.where(shared > 0, client.weights, client.state.tensor("weights"))
        parts = [shared] if client.count(shared) == client.space.sizes else [1 - shared, shared]
        for _ in range(client.training.epochs):
            for part in parts:
                weights = client.train(weights, epochs=1, trainable=part, batches=batches).weights
        state = client.state | {"weights": weights}
        if (client.round + 1) % self.every == 0:
            mask = self._still_shared(client, (weights - start).abs())
            if client.read((mask != shared).any()):
                state |= {MASK: PackedMask.pack(mask)}
        return ClientUpdate(update=shared * (start - weights), mask=shared, state=state, local=weights)

    def _still_shared(self, client: Client, moved: torch.Tensor) -> torch.Tensor:
        """The mask [total] of weights that stay shared. Running statistics always do."""
        space, pieces = client.space, []
        trained = space.parameters
        vectors = (trained.split(vector[: space.trained]) for vector in (client.mask, moved))
        for size, count, shared, piece in zip(
            trained.sizes, client.count(client.mask), *vectors, strict=False
        ):
            room = whole(self.most * size) - (size - count)
            taken = max(min(whole(self.rate * count), room), 0)
            pieces.append(shared.masked_fill(largest(piece.masked_fill(shared == 0, -1), taken), 0))
        return torch.cat([*pieces, client.mask[space.trained :]])

    def personal(self, weights: torch.Tensor, state: ClientState) -> torch.Tensor:
        """The shared weights of the server, and the client's personal ones."""
        assert state.mask is not None
        return torch.where(state.mask.unpack(like=weights) > 0, weights, state.tensor("weights"))
