"""FedSpa: every client trains the sparse model that its own mask cuts out of the global weights.

Paper, Algorithm 1. The client starts from m_k * w_t, trains with its mask fixed, sends U_k = start - end
and the mask that its searcher found for the next visit. The server averages the updates into its dense
weights and never masks them, so that a coordinate which a mask regrows starts warm.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedspa.client_state import ClientState, Item
from fedspa.masks.base import MaskSearcher, SearchInput
from fedspa.masks.checking import found_masks
from fedspa.masks.packed import PackedMask
from fedspa.methods.base import ClientTask, Method, Origin, Visit, VisitSize
from fedspa.records import SEED_BYTES, Costs
from fedspa.rounds.requests import Gradient, NextMask, Request, Trained

MEMORY = "search."
"""How the names begin under which a client's state keeps what its mask searcher remembers."""


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
        finds_first = task.first_visit and searcher.searches_first
        mask, known = task.own_mask.unpack(like=task.weights), task.own_mask
        memory: Mapping[str, Item] = task.state.part(MEMORY)
        if finds_first:
            gradient = None
            if searcher.needs_first_gradient:
                gradient = yield from self._gradient(task, task.weights, "first_mask_search")
            with task.clock("search"):
                search = self._search(task, mask, task.weights, gradient, "first_mask")
                (found,) = found_masks(searcher, [search], first=True)
                memory = searcher.remember(search, found)
                mask = torch.cat([found, mask[len(found) :]])
                known = PackedMask.pack(mask)
        start = searcher.start(task.weights, mask, memory)
        trained: Trained = yield task.train(start, task.training.epochs, mask=mask)
        if not finds_first:
            gradient = None
            if searcher.needs_gradient and searcher.searching(task.round):
                gradient = yield from self._gradient(task, trained.weights, "mask_search")
            search = self._search(task, mask, trained.weights, gradient, "regrow")
            next_mask: torch.Tensor = yield NextMask(searcher=searcher, search=search)
            with task.clock("search"):
                memory = searcher.remember(search, next_mask)
                if next_mask is not search.mask:
                    known = PackedMask.pack(torch.cat([next_mask, mask[len(next_mask) :]]))
        active = task.space.count(mask)
        return Visit(
            update=start - trained.weights,
            holds=mask,
            state=ClientState({MEMORY + name: item for name, item in memory.items()}, mask=known),
            local=trained.weights,
            loss=trained.loss,
            samples=trained.samples,
            costs=self.visit_costs(task.size(active), searcher),
        )

    @staticmethod
    def _gradient(
        task: ClientTask, weights: torch.Tensor, purpose: str
    ) -> Generator[Request, Any, torch.Tensor]:
        """The dense gradient [total] of one mini-batch of the client."""
        return (yield Gradient(weights=weights, rows=task.rows, generator=task.generator(purpose)))

    @staticmethod
    def _search(
        task: ClientTask,
        mask: torch.Tensor,
        weights: torch.Tensor,
        gradient: torch.Tensor | None,
        purpose: str,
    ) -> SearchInput:
        """A searcher sees the parameters alone; behind them, in running statistics, masks stay 1."""
        space, trained = task.space.parameters, task.space.trained
        return SearchInput(
            space=space,
            mask=mask[:trained],
            weights=weights[:trained],
            gradient=gradient if gradient is None else gradient[:trained],
            round=task.round,
            generator=task.generator(purpose),
            active=task.active[: len(space.names)],
            memory=task.state.part(MEMORY),
        )

    def visit_costs(self, size: VisitSize, searcher: MaskSearcher | None) -> Costs:
        """Values travel under a mask that both sides know; only masks that changed travel themselves."""
        assert searcher is not None and size.active is not None
        network, batch = size.network, size.training.batch_size
        finds_first = size.first and searcher.searches_first
        if finds_first:
            needs_gradient, searches = searcher.needs_first_gradient, True
        else:
            needs_gradient, searches = (
                size.searching and searcher.needs_gradient,
                size.searching and searcher.searches,
            )
        searched = min(batch, size.rows) if needs_gradient else 0
        if network.convention == "paper":
            searched = batch  # charged to every searcher, as the paper's tables do
        return self.down_costs(size, searcher) + Costs(
            train_flops=network.training_flops(size.active, size.training.samples(size.rows)),
            search_flops=network.search_flops(searched),
            up_bytes=network.value_bytes(size.active),
            mask_bytes=network.mask_bytes(size.active) if searches else 0,
        )

    def down_costs(self, size: VisitSize, searcher: MaskSearcher | None) -> Costs:
        """A random first mask travels as its seed; one that the client has yet to find needs all weights."""
        assert searcher is not None and size.active is not None
        network = size.network
        if size.first and searcher.searches_first:
            return Costs(down_bytes=network.value_bytes(None))
        drawn = size.first and network.mask_bytes(size.active) > 0
        return Costs(down_bytes=network.value_bytes(size.active), mask_bytes=SEED_BYTES if drawn else 0)

    def personal(
        self, weights: torch.Tensor, state: ClientState, searcher: MaskSearcher | None
    ) -> torch.Tensor:
        """m_{k,t+1} * w_{t+1}, or what else the searcher has training start from."""
        assert searcher is not None and state.mask is not None
        return searcher.start(weights, state.mask.unpack(like=weights), state.part(MEMORY))
