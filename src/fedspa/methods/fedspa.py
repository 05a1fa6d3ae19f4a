"""FedSpa: every client trains the sparse model that its own mask cuts out of the global weights.

Paper, Algorithm 1. The client starts from m_k * w_t, trains with its mask fixed, sends U_k = start - end
and the mask that its searcher found for the next visit. The server averages the updates into its dense
weights and never masks them, so that a coordinate which a mask regrows starts warm.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedspa.client_state import ClientState
from fedspa.masks.base import MaskSearcher, SearchInput
from fedspa.masks.packed import PackedMask
from fedspa.methods.base import ClientTask, Method, Origin, Visit, VisitSize
from fedspa.records import SEED_BYTES, Costs
from fedspa.rounds.requests import Gradient, NextMask, Request, Trained


@dataclass(kw_only=True)
class FedSpa(Method):
    """FedSpa with any mask searcher (DST, RSM, ...)."""

    weighting: str = "uniform"

    kinds: ClassVar[tuple[str, ...]] = ("global", "personal", "local")
    uses_mask: ClassVar[bool] = True
    uses_sparsity: ClassVar[bool] = True

    def first_state(self, client: int, origin: Origin) -> ClientState:
        return ClientState(mask=origin.initial_mask(client))

    def visit(self, task: ClientTask) -> Generator[Request, Any, Visit]:
        searcher = task.searcher
        assert searcher is not None
        mask = task.own_mask.unpack(like=task.weights)
        start = mask * task.weights
        trained: Trained = yield task.train(start, task.training.epochs, mask=mask)
        gradient: torch.Tensor | None = None
        if searcher.needs_gradient:
            batches = task.generator("mask_search")
            gradient = yield Gradient(weights=trained.weights, rows=task.rows, generator=batches)
        trained_part = task.space.trained  # a searcher sees the parameters alone, behind them all stays 1
        search = SearchInput(
            space=task.space.parameters,
            mask=mask[:trained_part],
            weights=trained.weights[:trained_part],
            gradient=gradient if gradient is None else gradient[:trained_part],
            round=task.round,
            generator=task.generator("regrow"),
        )
        next_mask: torch.Tensor = yield NextMask(searcher=searcher, search=search)
        with task.clock("search"):
            packed = task.own_mask
            if next_mask is not search.mask:
                packed = PackedMask.pack(torch.cat([next_mask, mask[trained_part:]]))
        active = task.space.count(mask)
        return Visit(
            update=start - trained.weights,
            holds=mask,
            state=ClientState(mask=packed),
            local=trained.weights,
            loss=trained.loss,
            samples=trained.samples,
            costs=self.visit_costs(task.size(active), searcher),
        )

    def visit_costs(self, size: VisitSize, searcher: MaskSearcher | None) -> Costs:
        """Values travel under a mask that both sides know; only masks that changed travel themselves."""
        assert searcher is not None and size.active is not None
        network, batch = size.network, size.training.batch_size
        searched = min(batch, size.rows) if searcher.needs_gradient else 0
        if network.convention == "paper":
            searched = batch  # charged to every searcher, as the paper's tables do
        mask_bytes = network.mask_bytes(size.active)
        first_mask = SEED_BYTES if size.first and mask_bytes else 0
        return Costs(
            train_flops=network.training_flops(size.active, size.training.samples(size.rows)),
            search_flops=network.search_flops(searched),
            down_bytes=network.value_bytes(size.active),
            up_bytes=network.value_bytes(size.active),
            mask_bytes=first_mask + (mask_bytes if searcher.searches else 0),
        )

    def personal(self, weights: torch.Tensor, state: ClientState) -> torch.Tensor:
        """m_{k,t+1} * w_{t+1}."""
        assert state.mask is not None
        return state.mask.unpack(like=weights) * weights
