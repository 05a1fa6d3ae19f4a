"""LotteryFL (Li et al., 2020): clients find lottery tickets, sub-networks that train from the initial weights.

A client that receives its part of the global model prunes it if it is accurate enough and still too dense. Then it
rewinds: it trains the remaining weights from w_0. Otherwise it trains on from the received weights. The published code
measures the accuracy on test data; here it is measured on the client's training data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedspa.core.client import Client, ClientUpdate
from fedspa.core.client_state import ClientState
from fedspa.core.packed_mask import PackedMask
from fedspa.core.server import ServerState
from fedspa.masks.magnitude import pruned
from fedspa.methods.pruning import PruningMethod


@dataclass(kw_only=True)
class LotteryFL(PruningMethod):
    """LotteryFL. Each weight is averaged over the clients whose mask has it, and stays if there is none. No tensor
    becomes sparser than `sparsity`. The received model must be accurate."""

    normaliser: ClassVar[str] = "holders"  # type: ignore[misc]  # part of the method: not a setting
    prune_rate: float = 0.2
    accuracy_threshold: float = 0.2

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        mask, state = client.mask, None
        start = mask * client.weights
        if self.too_dense(client) and client.accuracy(start, mask=mask) > self.accuracy_threshold:
            with client.timed("search"):
                counts = client.count(mask)
                mask = pruned(client.space, mask, counts, start, self.prune_rate, least=1 - self.sparsity)
            state, start = ClientState(mask=PackedMask.pack(mask)), mask * client.initial
        trained = client.train(start, mask=mask)
        return ClientUpdate(
            update=mask * (client.weights - trained.weights),
            mask=mask,
            state=state,
            local=trained.weights,
        )
