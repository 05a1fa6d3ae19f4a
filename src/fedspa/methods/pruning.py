"""The base class of Sub-FedAvg and LotteryFL: clients start with all weights, and prune their own by magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedspa.core.client import Client, Initial
from fedspa.core.client_state import ClientState
from fedspa.core.limits import limited
from fedspa.masks.magnitude import pruned_share
from fedspa.methods.base import Method

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class PruningMethod(Method):
    """Clients prune until they reach `sparsity`. Tensors of one dimension stay dense, and do not count."""

    weighting: str = "uniform"
    sparsity: float = limited(0.5, low=0, high=1, high_open=True)
    prune_rate: float = limited(low=0, high=1)
    """The share of a tensor's active weights that one pruning takes."""
    accuracy_threshold: float = limited(low=0, high=1)
    """The least accuracy, in [0, 1], on the client's training data for which it prunes."""

    uses_sparsity: ClassVar[bool] = True
    starts_dense: ClassVar[bool] = True
    needs_accuracy: ClassVar[bool] = True

    def client_init(self, client: int, initial: Initial) -> ClientState:
        return ClientState(mask=initial.full_mask)

    def too_dense(self, client: Client) -> bool:
        """True if the client has not reached the final sparsity."""
        return pruned_share(client.space, client.count(client.mask)) < self.sparsity

    def personal(self, weights: torch.Tensor, state: ClientState) -> torch.Tensor:
        """m_k * w, under the client's newest mask."""
        assert state.mask is not None
        return state.mask.unpack(like=weights) * weights
