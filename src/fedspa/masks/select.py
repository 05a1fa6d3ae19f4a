"""Exact selection of k coordinates by score. All searchers drop and grow by these functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import floor

import numpy as np
import torch


def whole(value: float) -> int:
    """The whole number at or below a value; a value that rounding left just below a whole number counts as it."""
    return floor(value + 1e-9)


def smallest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k smallest scores, exactly k of them; among equal scores those of lowest index.

    Args:
        scores: [n], float32 or float64, no NaN; or [..., n], with one selection along each last dimension.
        k: 0 <= k <= n.

    Returns:
        bool, in the shape of `scores`.
    """
    if k == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = _kth_smallest(scores, k)
    below = scores < threshold
    ties = scores == threshold
    # Of the scores equal to the threshold, take only the first ones, as many as are still needed. One scan over all
    # rows: a scan along the rows would use one block of a GPU for each.
    found = ties.flatten().cumsum(0, dtype=torch.int32).view_as(ties)
    before = found[..., :1] - ties[..., :1].to(torch.int32)
    return below | (ties & (found <= before + k - below.sum(-1, keepdim=True)))


def _kth_smallest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k-th smallest score [..., 1], k from 1. On the CPU NumPy's partition takes an eighth of kthvalue's time."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.partition(scores.numpy(), k - 1)[..., k - 1 : k])
    return kth_by_topk(scores, k)


def kth_by_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k-th smallest score [..., 1] on a GPU. There kthvalue uses one block for a tensor, and topk many."""
    count = scores.shape[-1]
    if 2 * k <= count:
        return torch.topk(scores, k, largest=False, sorted=False).values.amax(-1, keepdim=True)
    return torch.topk(scores, count - k + 1, largest=True, sorted=False).values.amin(-1, keepdim=True)


def largest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest scores, exactly k of them; among equal scores those of lowest index. bool, as `smallest`."""
    return smallest(-scores, k)


def without_smallest(mask: torch.Tensor, scores: torch.Tensor, k: int) -> torch.Tensor:
    """A mask without the k active coordinates of smallest score: bool, in the shape of `mask`."""
    active = mask.bool()
    return active & ~smallest(scores.masked_fill(~active, torch.inf), k)


def drop_and_grow(
    mask: torch.Tensor, drop_scores: torch.Tensor, grow_scores: torch.Tensor, k: int
) -> torch.Tensor:
    """Deactivate the k active coordinates of smallest drop score, then activate k inactive ones.

    The k largest grow scores among *all* inactive coordinates grow, the just dropped ones included. So the
    number of active coordinates stays the same.

    Args:
        mask: [n] zeros and ones; or [..., n], with one mask along each last dimension.
        drop_scores, grow_scores: in the shape of `mask`, finite.
        k: at most the number of active coordinates.

    Returns:
        The next mask, in shape and dtype of `mask`.
    """
    if k == 0:
        return mask
    kept = without_smallest(mask, drop_scores, k)
    grown = largest(grow_scores.masked_fill(kept, -torch.inf), k)
    return (kept | grown).to(mask.dtype)


def by_piece(
    rule: Callable[..., torch.Tensor],
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    vectors: Sequence[torch.Tensor],
    counts: Sequence[int],
) -> torch.Tensor:
    """Apply one of the rules above to each piece of some vectors [trained], with its count.

    `split` cuts a vector into its pieces: `ParameterSpace.split` into tensors, that of channels into groups of units.
    """
    pieces = zip(*map(split, vectors), counts, strict=True)
    return torch.cat([rule(*piece) for piece in pieces])


def share_out(total: int, shares: Sequence[float], limits: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to `shares`, whose sum is exactly `total`.

    A number above its limit becomes the limit, and the others share the rest. The largest remainders round up,
    among equal ones those of lowest index. If all shares are 0, all are treated alike.

    Args:
        total: at most the sum of the limits.
        shares: not negative, finite.
    """
    counts, left = [0] * len(limits), list(range(len(limits)))
    exact: dict[int, Fraction] = {}
    while left:
        parts = {i: Fraction(shares[i]) for i in left}
        if not any(parts.values()):
            parts = dict.fromkeys(left, Fraction(1))
        whole = sum(parts.values())
        exact = {i: total * part / whole for i, part in parts.items()}
        full = [i for i in left if exact[i] >= limits[i]]
        if not full:
            break
        for i in full:
            counts[i] = limits[i]
            total -= limits[i]
        left = [i for i in left if i not in full]
    for i in left:
        counts[i] = floor(exact[i])
    rest = total - sum(counts[i] for i in left)
    for i in sorted(left, key=lambda i: (counts[i] - exact[i], i))[:rest]:
        counts[i] += 1
    return counts
