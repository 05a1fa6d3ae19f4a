"""Pruning by magnitude: it removes the smallest active weights of each tensor of two or more dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedspa.masks.select import smallest, whole

if TYPE_CHECKING:
    import torch

    from fedspa.core.weights import ParameterSpace


def pruned(
    space: ParameterSpace,
    mask: torch.Tensor,
    counts: Sequence[int],
    weights: torch.Tensor,
    rate: float,
    least: float = 0.0,
) -> torch.Tensor:
    """The mask [total] without the share `rate` of the active weights of each tensor with two or more dimensions.

    Args:
        mask: [total], zeros and ones.
        counts: the active parameters of each tensor under `mask`.
        weights: [total]; their magnitude decides.
        least: the share of a tensor's weights that always stays.
    """
    import torch

    pieces = []
    vectors = space.split(mask), space.split(weights)
    for shape, size, before, active, weight in zip(space.shapes, space.sizes, counts, *vectors, strict=True):
        if len(shape) > 1:
            # The small slack keeps 0.29 x 100, which is 28.999999999999996 in binary, at 29.
            count = min(whole(rate * before), max(before - math.ceil(least * size - 1e-9), 0))
            dropped = smallest(weight.abs().masked_fill(active == 0, torch.inf), count)
            active = active.masked_fill(dropped, 0)
        pieces.append(active)
    return torch.cat(pieces)


def pruned_share(space: ParameterSpace, counts: Sequence[int]) -> float:
    """The inactive share of the tensors with two or more dimensions, from the active parameters of each tensor."""
    counted = [
        (size - active, size)
        for shape, size, active in zip(space.shapes, space.sizes, counts, strict=True)
        if len(shape) > 1
    ]
    return sum(inactive for inactive, _ in counted) / sum(size for _, size in counted)
