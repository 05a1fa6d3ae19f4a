"""FedDST (Bibikar et al., 2022): one sparse model for all; the clients readjust its mask every few rounds.

In such a round each client drops and grows weights before its last epoch, and trains that epoch under its new mask.
The server averages each weight over the clients whose mask has it, and keeps the largest of each tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedspa.core.client import Client, ClientUpdate, Initial
from fedspa.core.client_state import MASK, ClientState
from fedspa.core.errors import UserError
from fedspa.core.limits import limited
from fedspa.core.packed_mask import PackedMask
from fedspa.core.server import Aggregate, ServerState
from fedspa.core.settings import TrainingSettings
from fedspa.masks.base import MaskSearcher
from fedspa.masks.select import by_piece, largest
from fedspa.methods.base import MaskedMethod


@dataclass(kw_only=True)
class FedDST(MaskedMethod):
    """FedDST with any searcher that starts from one random mask for all clients. Grown weights start from 0."""

    normaliser: ClassVar[str] = "holders"  # type: ignore[misc]  # part of the method: not a setting
    every: int = limited(15, low=1)
    """R: the number of rounds from one readjustment to the next; the first is in round 1."""

    shares_mask: ClassVar[bool] = True
    moves_weights: ClassVar[bool] = True

    def check_training(self, training: TrainingSettings) -> None:
        if training.epochs < 2:
            raise UserError(
                f"training.epochs={training.epochs} leaves method={self.name} no epoch after its readjustment: it must "
                "be at least 2."
            )

    def check_mask(self, searcher: MaskSearcher) -> None:
        if searcher.searches_first or not searcher.is_fixed or searcher.initial != "same":
            raise UserError(
                f"method={self.name} starts from one random mask for all clients: use mask=dst and mask.initial=same."
            )
        if searcher.cuts_channels:
            raise UserError(
                f"method={self.name} chooses weights one by one, and mask={searcher.name} whole channels: use mask=dst."
            )

    def searching(self, round: int) -> bool:
        return round % self.every == 0 and self.searcher.searching(round)

    def client_init(self, client: int, initial: Initial) -> ClientState:
        return ClientState(mask=initial.mask(client))

    def server_init(self, initial: Initial) -> ServerState:
        mask = initial.mask(0)
        return ServerState(mask.unpack(like=initial.weights) * initial.weights, tensors={MASK: mask.bits})

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        start, mask, state, batches = client.weights, client.mask, None, client.generator("batches")
        if self.searching(client.round):
            epochs = client.training.epochs - 1
            first = client.train(start, epochs=epochs, mask=mask, batches=batches)
            state = self.searcher.next_state(client, start, first)
            assert state.mask is not None
            mask = state.mask.unpack(like=start)
            trained = client.train(mask * first.weights, epochs=1, mask=mask, batches=batches)
        else:
            trained = client.train(start, mask=mask, batches=batches)
        update = mask * (start - trained.weights)
        return ClientUpdate(update=update, mask=mask, state=state, local=trained.weights)

    def server_update(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        held, update = aggregate.held, aggregate.update
        assert held is not None and update is not None
        weights = torch.where(held, server.weights - update, 0)
        scores = weights.abs().masked_fill(~held, -1)
        counts = [*self.searcher.target, *aggregate.space.running.sizes]
        mask = by_piece(largest, aggregate.space.split, (scores,), counts).to(weights)
        return replace(server, weights=mask * weights, tensors={MASK: PackedMask.pack(mask).bits.cpu()})
