"""Exact selection of k coordinates by score: the one place where drop and grow are decided."""

from __future__ import annotations

import numpy as np
import torch


def smallest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k smallest scores, exactly k of them; among equals those of the lowest index.

    Args:
        scores: [n], float32 or float64, no NaN; or [..., n], of whose last dimension each is a choice of its own.
        k: 0 <= k <= n.

    Returns:
        bool, in the shape of `scores`.
    """
    if k == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = _kth_smallest(scores, k)
    below = scores < threshold
    ties = scores == threshold
    # Of the scores that equal the threshold, only as many as are still wanted: the first ones.
    return below | (ties & (ties.cumsum(-1) <= k - below.sum(-1, keepdim=True)))


def _kth_smallest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k-th smallest score [..., 1], k from 1. On the CPU NumPy's partition takes an eighth of torch's kthvalue."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.partition(scores.numpy(), k - 1)[..., k - 1 : k])
    return kth_by_topk(scores, k)


def kth_by_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The same for a GPU, where kthvalue has a single block at work on a tensor, and topk many."""
    count = scores.shape[-1]
    if 2 * k <= count:
        return torch.topk(scores, k, largest=False, sorted=False).values.amax(-1, keepdim=True)
    return torch.topk(scores, count - k + 1, largest=True, sorted=False).values.amin(-1, keepdim=True)


def largest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest scores, exactly k of them; among equals those of the lowest index. bool, as `smallest`."""
    return smallest(-scores, k)


def drop_and_grow(
    mask: torch.Tensor, drop_scores: torch.Tensor, grow_scores: torch.Tensor, k: int
) -> torch.Tensor:
    """Deactivate the k active coordinates of smallest drop score, then activate k inactive ones.

    Grown are the k largest grow scores among *all* inactive coordinates, the just dropped ones included,
    so the number of active coordinates stays what it was.

    Args:
        mask: [n] zeros and ones; or [..., n], of whose last dimension each is a mask of its own.
        drop_scores, grow_scores: as long, finite.
        k: at most the number of active coordinates.

    Returns:
        The next mask, in shape and dtype of `mask`.
    """
    active = mask.bool()
    kept = active & ~smallest(drop_scores.masked_fill(~active, torch.inf), k)
    grown = largest(grow_scores.masked_fill(kept, -torch.inf), k)
    return (kept | grown).to(mask.dtype)
