"""SSFL (Ohib et al., 2026): one sparse model for all. Its mask is found once, from the saliencies of all clients.

Before round 1 every client sends |g * w_0| of one mini-batch, and the mask keeps the largest of their mean. Then it is
FedAvg inside this mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedspa.core.client import Client, ClientUpdate, Initial
from fedspa.core.client_state import MASK, ClientState
from fedspa.core.errors import UserError
from fedspa.core.packed_mask import PackedMask
from fedspa.core.server import Aggregate, ServerState
from fedspa.masks.base import MaskSearcher
from fedspa.masks.search_input import SearchInput
from fedspa.methods.base import MaskedMethod


@dataclass(kw_only=True)
class SSFL(MaskedMethod):
    """SSFL. Tensors of one dimension come first: biases that start at 0 have no saliency, so they would be pruned."""

    shares_mask: ClassVar[bool] = True

    def check_mask(self, searcher: MaskSearcher) -> None:
        if not searcher.needs_first_gradient:
            raise UserError(
                f"mask={searcher.name} finds no mask by saliency, as method={self.name} needs it: use mask=snip."
            )

    def searching(self, round: int) -> bool:
        return False

    def client_init(self, client: int, initial: Initial) -> ClientState:
        return ClientState(mask=initial.full_mask)

    def server_init(self, initial: Initial) -> ServerState:
        return replace(super().server_init(initial), tensors={MASK: initial.full_mask.bits})

    def client_prepare(self, client: Client, server: ServerState) -> ClientUpdate:
        gradient = client.gradient(client.weights, "saliency")
        return ClientUpdate(update=None, tensors={"saliency": (gradient * client.weights).abs()}, local=None)

    def server_prepare(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        space, saliency = aggregate.space, aggregate.tensors["saliency"]
        for shape, piece in zip(space.shapes, space.split(saliency), strict=True):
            if len(shape) == 1:
                piece.fill_(torch.inf)
        ones, parameters = torch.ones_like(saliency), space.parameters
        search = SearchInput(
            space=parameters,
            mask=ones[: space.trained],
            weights=ones[: space.trained],
            gradient=saliency[: space.trained],  # already times the weights
            round=0,
            generator=torch.Generator(),
            counts=parameters.sizes,
        )
        mask = torch.cat([self.searcher.first_mask(search), ones[space.trained :]])
        return replace(
            server, weights=mask * server.weights, tensors={MASK: PackedMask.pack(mask).bits.cpu()}
        )

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        trained = client.train(client.weights, mask=client.mask)
        update = client.weights - trained.weights
        return ClientUpdate(update=update, mask=client.mask, local=trained.weights)
