"""A mask searcher decides which parameters of a client are active, at first and after each training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedspa.core.client import Client, Trained
from fedspa.core.client_state import MASK, ClientState, Item
from fedspa.core.errors import check_choice
from fedspa.core.packed_mask import PackedMask
from fedspa.masks.checking import check_mask, refusal
from fedspa.masks.search_input import SearchInput

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class MaskSearcher(ABC):
    """Next_Masks of the paper's Algorithm 1, and how the first masks are drawn."""

    name: str
    initial: str = "same"
    """Whether all clients start from the same random mask or each from a different one."""

    def __post_init__(self) -> None:
        check_choice("mask.initial", self.initial, ("same", "different"))

    @abstractmethod
    def next_mask(self, search: SearchInput) -> torch.Tensor:
        """The next mask [trained], zeros and ones in the dtype of `search.mask`; that itself to change nothing."""

    @property
    @abstractmethod
    def searches(self) -> bool:
        """Whether masks change, so that the next one has to travel."""

    @property
    @abstractmethod
    def needs_gradient(self) -> bool:
        """Whether a search looks at the dense gradient, which it then costs."""

    def searching(self, round: int) -> bool:
        """Whether masks are searched for in a round (from 0); in others they stay, and nothing is charged."""
        return True

    @property
    def searches_first(self) -> bool:
        """Whether a client's first mask is found from its data, by `first_mask`. The client then receives the dense
        weights, and does not search again in that round. Else the first mask is drawn at random."""
        return False

    @property
    def needs_first_gradient(self) -> bool:
        """Whether `first_mask` looks at the dense gradient, which it then costs."""
        return self.searches_first

    @property
    def keeps_counts(self) -> bool:
        """Whether every tensor has as many active parameters as the layer sparsity gives it, so that costs can be
        told before a run. A mask that breaks this promise ends the run."""
        return True

    def first_mask(self, search: SearchInput) -> torch.Tensor:
        """The first mask [trained] of a client; asked for where `searches_first`."""
        return search.mask

    def remember(self, search: SearchInput, next_mask: torch.Tensor) -> Mapping[str, Item]:
        """Tensors and packed masks to keep in the client's state beside its next mask [trained], by name (not "mask").

        They come back as `memory`.
        """
        return {}

    def start(self, weights: torch.Tensor, mask: torch.Tensor, memory: Mapping[str, Item]) -> torch.Tensor:
        """The client's model [total] made of the global weights [total], its mask [total] and its state.

        There the client's training starts, and it is the personal model in between. Running statistics may lie behind
        the parameters; the mask is 1 there.
        """
        return mask * weights

    def first_state(self, client: Client) -> ClientState:
        """The state of a new client that has just received the weights: with a first mask from its data, if need be."""
        if not self.searches_first:
            return client.state
        gradient = None
        if self.needs_first_gradient:
            gradient = client.gradient(client.weights, "first_mask_search")
        with client.timed("search"):
            search = self._search(client, client.weights, gradient, "first_mask")
            return self._state(client, search, self._found(search, first=True))

    def next_state(self, client: Client, trained: Trained) -> ClientState:
        """The state of a client after its training: the next mask, and what the searcher remembers."""
        if client.first and self.searches_first:
            return client.state
        gradient = None
        if self.needs_gradient and self.searching(client.round):
            gradient = client.gradient(trained.weights, "mask_search")
        with client.timed("search"):
            search = self._search(client, trained.weights, gradient, "regrow")
            return self._state(client, search, self._found(search))

    def _search(
        self, client: Client, weights: torch.Tensor, gradient: torch.Tensor | None, purpose: str
    ) -> SearchInput:
        """The parameters' part of everything."""
        space, trained = client.space.parameters, client.space.trained
        tensors = len(space.names)
        return SearchInput(
            space=space,
            mask=client.mask[:trained],
            weights=weights[:trained],
            gradient=gradient if gradient is None else gradient[:trained],
            round=client.round,
            generator=client.generator(purpose),
            active=client.target_counts[:tensors],
            counts=client.count(client.mask)[:tensors],
            memory=client.state,
        )

    def _found(self, search: SearchInput, first: bool = False) -> torch.Tensor:
        """The mask [trained] of `first_mask` or of `next_mask`, checked.

        Raises `UserError` that names the searcher for anything but a mask as `search.mask` is one, in the counts that
        it promises; for another mask than before where it says that it does not search; and where it writes into what
        it was given.
        """
        title = f"mask={self.name} ({type(self).__module__}.{type(self).__qualname__})"
        given = search.mask, search.weights
        versions = [tensor._version for tensor in given]  # torch counts the writes into a tensor
        mask = self.first_mask(search) if first else self.next_mask(search)
        if versions != [tensor._version for tensor in given]:
            raise refusal(title, search, "a mask, but wrote into search.mask or search.weights to find it")
        if mask is not search.mask or first:
            may_change = first or (self.searches and self.searching(search.round))
            check_mask(title, search, mask, keeps_counts=self.keeps_counts, may_change=may_change)
        return mask

    def _state(self, client: Client, search: SearchInput, mask: torch.Tensor) -> ClientState:
        """The client's state with a mask [trained] that a search found."""
        import torch

        memory = self.remember(search, mask)
        if mask is search.mask:
            return ClientState(memory, mask=client.state[MASK])
        return ClientState(memory, mask=PackedMask.pack(torch.cat([mask, client.mask[len(mask) :]])))

    def describe(self, round: int) -> dict[str, float]:
        """Quantities of a round (from 0) worth logging, by name; the same names in every round."""
        return {}
