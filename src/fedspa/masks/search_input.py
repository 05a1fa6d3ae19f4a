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
    """The input of a search: after a client's local training or, in `first_mask`, before its first training.

    A searcher must not write into these tensors. They hold the parameters alone, [trained]; running statistics
    are never masked.
    """

    space: ParameterSpace
    mask: torch.Tensor
    """The mask of the training, [trained] zeros and ones in the dtype of the weights; all ones in `first_mask`."""
    weights: torch.Tensor
    """The trained sparse weights [trained]; in `first_mask` the dense global ones. Read only."""
    gradient: torch.Tensor | None
    """Dense gradient [trained] of one mini-batch of the client at `weights`; None unless the searcher needs it."""
    round: int
    """The round, from 0."""
    generator: torch.Generator
    """The source of this client's random draws in this round."""
    counts: Sequence[int]
    """The active parameters of each tensor under `mask`."""
    start: torch.Tensor | None = None
    """The sparse weights [trained] that the training began from. Set in every run."""
    received: torch.Tensor | None = None
    """The server's dense weights w_t [trained]; None if the client received only those under its mask. They are set
    in `first_mask`, and in the rounds of `receives_dense`."""
    memory: Mapping[str, Item] = field(default_factory=dict)
    """The client's state, with the items that `remember` returned at the client's last update."""


def random_scores(search: SearchInput) -> torch.Tensor:
    """A random score in [0, 1) for each parameter: [trained], in the dtype and on the device of the weights."""
    from fedspa.core.randomness import uniform

    return uniform(search.space.total, search.generator, search.weights)
