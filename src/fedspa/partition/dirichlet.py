"""The paper's non-IID partition: Dirichlet shares of every class, clients of unequal size.

The paper says only "Dirichlet with gamma". The rest follows the code that is common in the field: each class is
divided by shares drawn over the *clients*; a client with its even share N/K gets nothing more; and a draw that
leaves some client too few rows is repeated as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedspa.core.errors import UserError
from fedspa.core.limits import limited
from fedspa.partition.base import Partition, deal_classes


@dataclass(kw_only=True)
class Dirichlet(Partition):
    """A smaller gamma makes clients less alike; a huge gamma gives every client the same shares."""

    gamma: float = limited(0.3, low=0, low_open=True)
    min_size: int = limited(10, low=1)
    """The least number of rows of a client. A draw with fewer is repeated."""
    attempts: int = limited(1000, low=1)
    """The largest number of draws."""

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
            f"partition.gamma={self.gamma} found no partition of {len(labels)} rows over "
            f"federation.clients={clients} (N/K = {len(labels) / clients:.1f}) that leaves everyone at least "
            f"partition.min_size={self.min_size}, in partition.attempts={self.attempts} attempts: the best "
            f"minimum reached was {best}; a larger gamma, a smaller minimum or fewer clients would do."
        )

    def _draw(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray | None:
        """The rows int64 [clients, classes] of one attempt; None if there is no client left for a class."""
        counts = np.zeros((clients, len(sizes)), dtype=np.int64)
        even_share = sizes.sum() / clients
        for column, size in enumerate(sizes):
            shares = rng.dirichlet(np.full(clients, self.gamma))
            shares[counts.sum(axis=1) >= even_share] = 0
            cumulative = np.cumsum(shares)
            if not cumulative[-1] > 0:  # no client is open, or the draw is not a number
                return None
            # Divided by their last value, the shares reach exactly 1 at the last open client. So rounding cannot give a
            # row to a full client after it.
            cuts = (cumulative / cumulative[-1] * size).astype(np.int64)
            counts[:, column] = np.diff(cuts, prepend=0)
        return counts
