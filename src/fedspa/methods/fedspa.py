"""FedSpa: every client trains the sparse model that its own mask cuts out of the global weights (paper, Algorithm 1).

The server averages the updates into its dense weights and never masks them, so that a coordinate which a mask
regrows starts warm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedspa.core.client import Client, ClientUpdate, Initial
from fedspa.core.client_state import ClientState
from fedspa.core.server import ServerState
from fedspa.methods.base import MaskedMethod

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class FedSpa(MaskedMethod):
    """FedSpa with any mask searcher (DST, RSM, ...)."""

    weighting: str = "uniform"
    kinds: ClassVar[tuple[str, ...]] = ("global", "personal", "local")

    def client_init(self, client: int, initial: Initial) -> ClientState:
        """m_{k,0}: the client's first mask."""
        return ClientState(mask=initial.mask(client))

    def client_start(self, client: Client, server: ServerState) -> ClientState:
        """A searcher may find the first mask from the client's data."""
        return self.searcher.first_state(client)

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        """Algorithm 1, the client's side."""
        start = self.searcher.start(client.weights, client.mask, client.state)  # m_{k,t} * w_t
        trained = client.train(start, mask=client.mask)  # N steps of Eq. 3 under the fixed mask
        state = self.searcher.next_state(client, trained)  # m_{k,t+1}: Algorithm 2 or 3
        return ClientUpdate(
            update=start - trained.weights,  # U_k
            mask=client.mask,
            state=state,
            local=trained.weights,
        )

    def personal(self, weights: torch.Tensor, state: ClientState) -> torch.Tensor:
        """m_{k,t+1} * w_{t+1}: where the client's next training starts."""
        assert state.mask is not None
        return self.searcher.start(weights, state.mask.unpack(like=weights), state)
