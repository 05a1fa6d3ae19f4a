"""What a mask searcher is: the plug-in of FedSpa that decides a client's next mask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedspa.errors import check_choice

if TYPE_CHECKING:
    import torch

    from fedspa.client_state import Item
    from fedspa.weights import ParameterSpace


@dataclass(frozen=True)
class SearchInput:
    """What a searcher may look at, and must not write into: right after a client's local training or, in `first_mask`,
    before its first one."""

    space: ParameterSpace
    mask: torch.Tensor
    """The mask trained with, [total] zeros and ones in the dtype of the weights; all ones in `first_mask`."""
    weights: torch.Tensor
    """The trained sparse weights, [total]; in `first_mask` the dense global ones, not to be written."""
    gradient: torch.Tensor | None
    """Dense gradient [total] of one mini-batch of the client at `weights`; None unless the searcher needs it."""
    round: int
    """From 0."""
    generator: torch.Generator
    """For random draws of this client in this round."""
    active: Sequence[int] = ()
    """How many parameters of each tensor the layer sparsity wants active."""
    memory: Mapping[str, Item] = field(default_factory=dict)
    """What the searcher remembered of this client at its last visit."""


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
        """The mask [total] for the client's next visit, zeros and ones in the dtype of `search.mask`; that itself where
        the mask does not change."""

    def next_masks(self, searches: Sequence[SearchInput]) -> list[torch.Tensor]:
        """The masks of clients whose search comes at the same time, in their order: those of `next_mask`.

        To be overridden where a GPU gains from looking at all of them at once.
        """
        return [self.next_mask(search) for search in searches]

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
        """Whether a client's first mask is found at its first visit, by `first_mask`. The client then gets the dense
        weights, and that is the only search of the visit. Else the first mask is drawn at random."""
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
        """The mask [total] of a client that is visited for the first time; asked for where `searches_first`."""
        return search.mask

    def remember(self, search: SearchInput, next_mask: torch.Tensor) -> Mapping[str, Item]:
        """What to keep of the client until its next visit besides the next mask [total]: tensors and packed masks by
        name. They come back as `memory`."""
        return {}

    def start(self, weights: torch.Tensor, mask: torch.Tensor, memory: Mapping[str, Item]) -> torch.Tensor:
        """The client's model [total] made of the global weights and its mask: where its training starts, and what its
        personal model is in between. Behind the parameters that a search sees there may be running statistics, where
        the mask is 1."""
        return mask * weights

    def describe(self, round: int) -> dict[str, float]:
        """Quantities of a round (from 0) worth logging, by name; the same names in every round."""
        return {}
