"""FedSpa: every client trains the sparse model that its own mask cuts out of the global weights (paper, Algorithm 1).

The server averages the updates into its dense weights and never masks them, so that a coordinate which a mask
regrows starts warm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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

    def client_init(self, client: int, initial: Initial) -> ClientState:
        """m_{k,0}: the client's first mask."""
        return ClientState(mask=initial.mask(client))

    def client_start(self, client: Client, server: ServerState) -> ClientState:
        """The state with a first mask; some searchers find it from the client's data."""
        return self.searcher.first_state(client)

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        """The client's side of Algorithm 1."""
        mask = client.mask
        start = self.searcher.start(client.weights, mask, client.state)  # m_{k,t} * w_t
        forward = self.searcher.forward_mask(start, mask)  # all of the mask, but for Top-KAST
        trained = client.train(start, mask=mask, forward=forward)  # N steps of Eq. 3 under the fixed mask
        state = self.searcher.next_state(client, start, trained)  # m_{k,t+1}: Algorithm 2 or 3
        return ClientUpdate(
            update=start - trained.weights,  # U_k
            mask=mask,
            state=state,
            local=self.searcher.model(trained.weights, mask),
        )

    def personal(self, weights: torch.Tensor, state: ClientState) -> torch.Tensor:
        """m_{k,t+1} * w_{t+1}: the start of the client's next training."""
        assert state.mask is not None
        mask = state.mask.unpack(like=weights)
        return self.searcher.model(self.searcher.start(weights, mask, state), mask)
