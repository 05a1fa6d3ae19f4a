"""The base class of Sub-FedAvg and LotteryFL: clients start with all weights, and prune their own by magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedspa.core.client import Client, Initial
from fedspa.core.client_state import ClientState
from fedspa.core.errors import check_range
from fedspa.masks.magnitude import pruned_share
from fedspa.methods.base import Method

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class PruningMethod(Method):
    """Clients prune until they reach `sparsity`. Tensors of one dimension stay dense, and do not count."""

    weighting: str = "uniform"
    sparsity: float = 0.5
    prune_rate: float
    """The share of a tensor's active weights that one pruning takes."""
    accuracy_threshold: float
    """The least accuracy, in [0, 1], on the client's training data for which it prunes."""

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

    def too_dense(self, client: Client) -> bool:
        """True if the client has not reached the final sparsity."""
        return pruned_share(client.space, client.count(client.mask)) < self.sparsity

    def personal(self, weights: torch.Tensor, state: ClientState) -> torch.Tensor:
        """m_k * w, under the client's newest mask."""
        assert state.mask is not None
        return state.mask.unpack(like=weights) * weights
