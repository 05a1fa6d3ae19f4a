"""LotteryFL (Li et al., 2020): clients find lottery tickets, sub-networks that train from the initial weights.

A client that receives its part of the global model prunes it if it is accurate enough and still too dense. Then it
rewinds: it trains the remaining weights from w_0. Otherwise it trains on from the received weights. The published code
measures the accuracy on test data; here it is measured on the client's training data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedspa.core.client import Client, ClientUpdate, Initial
from fedspa.core.client_state import ClientState
from fedspa.core.errors import check_range
from fedspa.core.packed_mask import PackedMask
from fedspa.core.server import ServerState
from fedspa.masks.magnitude import pruned, pruned_share
from fedspa.methods.base import Method


@dataclass(kw_only=True)
class LotteryFL(Method):
    """LotteryFL. Each weight is averaged over the clients whose mask has it, and stays if there is none."""

    weighting: str = "uniform"
    normaliser: ClassVar[str] = "holders"  # type: ignore[misc]  # part of the method: not a setting
    sparsity: float = 0.5
    """The final sparsity: no tensor becomes sparser. Tensors of one dimension stay dense and do not count."""
    prune_rate: float = 0.2
    """The share of a tensor's active weights that one pruning takes."""
    accuracy_threshold: float = 0.2
    """The least accuracy, in [0, 1], of the received model on the client's training data."""

    kinds: ClassVar[tuple[str, ...]] = ("global", "personal", "local")
    uses_sparsity: ClassVar[bool] = True
    starts_dense: ClassVar[bool] = True
    needs_accuracy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.sparsity", self.sparsity, low=0, high=1, high_open=True)
        check_range("method.prune_rate", self.prune_rate, low=0, high=1)
        check_range("method.accuracy_threshold", self.accuracy_threshold, low=0, high=1)

    def client_init(self, client: int, initial: Initial) -> ClientState:
        return ClientState(mask=initial.full_mask)

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        mask, state = client.mask, None
        start = mask * client.weights
        if self._too_dense(client) and client.accuracy(start, mask=mask) > self.accuracy_threshold:
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

    def _too_dense(self, client: Client) -> bool:
        return pruned_share(client.space, client.count(client.mask)) < self.sparsity

    def personal(self, weights: torch.Tensor, state: ClientState) -> torch.Tensor:
        """m_k * w."""
        assert state.mask is not None
        return state.mask.unpack(like=weights) * weights
