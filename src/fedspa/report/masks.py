"""The overlap of the clients' masks, and its correlation with their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from fedspa.report.runs import Run

PERMUTATIONS = 999
CHUNK = 8192
"""Bytes of each mask that are unpacked at a time: sums of so many ones are exact in float32."""


@dataclass(frozen=True)
class Overlap:
    """Every pair of clients that have masks: how alike their labels are, and how much their masks share."""

    label_similarity: np.ndarray
    """float64 [pairs]: the share of their label distributions that both have, 1 - total variation distance."""
    mask_overlap: np.ndarray
    """float64 [pairs]: |both| / |either| over the tensors that are sparse in some mask."""
    by_chance: float
    """The overlap to expect of two random masks with these densities."""
    correlation: float | None
    """Pearson's; None where one side does not vary, as with equal masks."""
    p_value: float | None
    """The p-value of Mantel's test: pairs are not independent, so it permutes clients, not pairs."""


@cache
def densities(run: Run) -> np.ndarray:
    """The density of each tensor in each client's mask: float64 [clients, tensors]."""
    _, masks = run.masks()
    sizes = _sizes(run)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    active = [
        np.add.reduceat(np.unpackbits(bits, count=sizes.sum()), starts, dtype=np.int64) for bits in masks
    ]
    return np.stack(active) / sizes


def layer_densities(runs: Sequence[Run]) -> dict[str, np.ndarray]:
    """The density of each layer's weights in each mask of all runs: float64 [masks]; biases and norms are left out.

    The runs have the same tensors.
    """
    found = np.concatenate([densities(run) for run in runs])
    return {
        name.removesuffix(".weight"): found[:, i]
        for i, (name, shape) in enumerate(runs[0].tensors)
        if len(shape) > 1
    }


def overlap(run: Run) -> Overlap | None:
    """Mask overlap against label similarity; None with fewer than three masks, no sparse tensor, or no label counts."""
    if run.label_counts is None:
        return None
    clients, masks = run.masks()
    shares, sizes = densities(run), _sizes(run)
    sparse = (shares < 1).any(axis=0)
    if len(clients) < 3 or not sparse.any():
        return None
    both = _common_weights(masks & np.packbits(np.repeat(sparse, sizes)))
    active = both.diagonal()
    shared = both / (active[:, None] + active[None, :] - both)

    labels = run.label_counts[clients] / run.label_counts[clients].sum(axis=1, keepdims=True)
    similar = np.minimum(labels[:, None, :], labels[None, :, :]).sum(axis=2)
    upper = np.triu_indices(len(clients), k=1)
    mean = shares.mean(axis=0)[sparse]
    by_chance = float((mean**2 @ sizes[sparse]) / ((2 * mean - mean**2) @ sizes[sparse]))
    return Overlap(similar[upper], shared[upper], by_chance, *_mantel(similar, shared))


def _sizes(run: Run) -> np.ndarray:
    """int64 [tensors]: the number of weights of each."""
    return np.array([math.prod(shape) for _, shape in run.tensors])


def _common_weights(masks: np.ndarray) -> np.ndarray:
    """float64 [clients, clients]: how many weights each pair of masks (uint8 [clients, bytes]) both keep."""
    both = np.zeros((len(masks), len(masks)))
    for start in range(0, masks.shape[1], CHUNK):
        bits = np.unpackbits(masks[:, start : start + CHUNK], axis=1).astype(np.float32)
        both += bits @ bits.T
    return both


def _mantel(first: np.ndarray, second: np.ndarray) -> tuple[float | None, float | None]:
    """Pearson's correlation of two symmetric matrices off the diagonal, and the share of permutations that reach it."""
    upper = np.triu_indices(len(first), k=1)
    if np.ptp(first[upper]) < 1e-12 or np.ptp(second[upper]) < 1e-12:
        return None, None
    first = (first - first[upper].mean()) / first[upper].std()  # a permutation keeps mean and deviation
    scores = (second[upper] - second[upper].mean()) / second[upper].std()
    found = float(np.mean(first[upper] * scores))
    source = np.random.default_rng(0)
    reached = 0
    for _ in range(PERMUTATIONS):
        order = source.permutation(len(first))
        by_chance = float(np.mean(first[np.ix_(order, order)][upper] * scores))
        reached += abs(by_chance) >= abs(found) - 1e-12
    return found, (reached + 1) / (PERMUTATIONS + 1)
