"""The paper's non-IID partition: Dirichlet shares of every class, clients of unequal size.

The paper says only "Dirichlet with gamma"; the rest is that of the code its field shares: each class is dealt
by shares drawn over the *clients*, a client that holds its even share N/K gets nothing more, and a draw that
leaves somebody too little is thrown away whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedspa.core.errors import UserError, check_range
from fedspa.partition.base import Partition, deal_classes


@dataclass(kw_only=True)
class Dirichlet(Partition):
    """Smaller gamma, less alike clients; a huge gamma gives every client the same shares."""

    gamma: float = 0.3
    min_size: int = 10
    """A draw that leaves a client fewer rows is repeated ..."""
    attempts: int = 1000
    """... at most so often."""

    def __post_init__(self) -> None:
        check_range("partition.gamma", self.gamma, low=0, low_open=True)
        check_range("partition.min_size", self.min_size, low=1)
        check_range("partition.attempts", self.attempts, low=1)

    def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        values, sizes = np.unique(labels, return_counts=True)
        best = 0
        for _ in range(self.attempts):
            counts = self._draw(sizes, clients, rng)
            if counts is None:
                continue
            smallest = int(counts.sum(axis=1).min())
            if smallest >= self.min_size:
                return deal_classes(labels, values, counts, rng)
            best = max(best, smallest)
        raise UserError(
            f"partition.gamma={self.gamma} found no partition of {len(labels)} images over "
            f"federation.clients={clients} (N/K = {len(labels) / clients:.1f}) that leaves everyone at least "
            f"partition.min_size={self.min_size}, in partition.attempts={self.attempts} attempts: the best "
            f"minimum reached was {best}; a larger gamma, a smaller minimum or fewer clients would do."
        )

    def _draw(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray | None:
        """Rows int64 [clients, classes] of one attempt; None where a class finds no client to go to."""
        counts = np.zeros((clients, len(sizes)), dtype=np.int64)
        even_share = sizes.sum() / clients
        for column, size in enumerate(sizes):
            shares = rng.dirichlet(np.full(clients, self.gamma))
            shares[counts.sum(axis=1) >= even_share] = 0
            cumulative = np.cumsum(shares)
            if not cumulative[-1] > 0:  # nothing left to give to, or a draw that is not a number
                return None
            # Divided by their own last value the shares end at exactly 1, from the last open client on: no
            # rounding can hand a row to a full client behind it.
            cuts = (cumulative / cumulative[-1] * size).astype(np.int64)
            counts[:, column] = np.diff(cuts, prepend=0)
        return counts
