"""The input of a mask search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedspa.core.client_state import Item

if TYPE_CHECKING:
    import torch

    from fedspa.core.weights import ParameterSpace


@dataclass(frozen=True)
class SearchInput:
    """The input of a search: right after a client's local training or, in `first_mask`, before its first training.

    A searcher does not write into these tensors. It sees the parameters alone, [trained]; running statistics behind
    them are never masked.
    """

    space: ParameterSpace
    mask: torch.Tensor
    """The mask trained with, [trained] zeros and ones in the dtype of the weights; all ones in `first_mask`."""
    weights: torch.Tensor
    """The trained sparse weights, [trained]; in `first_mask` the dense global ones, not to be written."""
    gradient: torch.Tensor | None
    """Dense gradient [trained] of one mini-batch of the client at `weights`; None unless the searcher needs it."""
    round: int
    """From 0."""
    generator: torch.Generator
    """For random draws of this client in this round."""
    counts: Sequence[int]
    """Active parameters of each tensor under `mask`."""
    active: Sequence[int] = ()
    """Active parameters of each tensor that the layer sparsity asks for."""
    memory: Mapping[str, Item] = field(default_factory=dict)
    """The client's state: in it lies what `remember` gave at the client's last update."""
