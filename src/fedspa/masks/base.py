"""What a mask searcher is: the plug-in of FedSpa that decides a client's next mask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedspa.errors import check_choice

if TYPE_CHECKING:
    import torch

    from fedspa.weights import ParameterSpace


@dataclass(frozen=True)
class SearchInput:
    """What a searcher may look at, right after a client's local training."""

    space: ParameterSpace
    mask: torch.Tensor
    """The mask trained with, [total] zeros and ones in the dtype of the weights."""
    weights: torch.Tensor
    """The trained sparse weights, [total]."""
    gradient: torch.Tensor | None
    """Dense gradient [total] of one mini-batch of the client at `weights`; None unless the searcher needs it."""
    round: int
    """From 0."""
    generator: torch.Generator
    """For random draws of this client in this round."""


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
        """The mask [total] for the client's next visit; `search.mask` itself where it does not change."""

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

    def describe(self, round: int) -> dict[str, float]:
        """Quantities of a round (from 0) worth logging, by name; the same names in every round."""
        return {}
