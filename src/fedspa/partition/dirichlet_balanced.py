"""Dirichlet label shares for each client, at equal client sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedspa.core.limits import limited
from fedspa.partition.base import Partition, deal_classes


@dataclass(kw_only=True)
class DirichletBalanced(Partition):
    """Every client draws its label shares over the *classes*. All clients have equally many rows.

    The shares are Dirichlet(gamma x classes x frequency of the class), which is Dirichlet(gamma) for balanced
    classes and approaches IID for a huge gamma in any case. Clients take rows in random order and without
    replacement. If a class is used up, the client takes more of the others.
    """

    gamma: float = limited(0.3, low=0, low_open=True)

    def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        values, left = np.unique(labels, return_counts=True)
        concentration = self.gamma * len(values) * left / len(labels)
        sizes = np.full(clients, len(labels) // clients)
        sizes[: len(labels) % clients] += 1
        counts = np.zeros((clients, len(values)), dtype=np.int64)
        for client in rng.permutation(clients):
            counts[client] = _take(rng.dirichlet(concentration), sizes[client], left, rng)
            left -= counts[client]
        return deal_classes(labels, values, counts, rng)


def _take(shares: np.ndarray, size: int, left: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`size` rows int64 [classes] by `shares`, at most what is `left` of each class."""
    taken = np.zeros_like(left)
    while (missing := size - taken.sum()) > 0:  # each turn but the last uses up a class
        wanted = shares * (taken < left)
        if not wanted.sum() > 0:  # all wanted classes are used up
            wanted = (left - taken).astype(float)
        drawn = rng.multinomial(missing, wanted / wanted.sum())
        taken += np.minimum(drawn, left - taken)
    return taken
