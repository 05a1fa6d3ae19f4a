"""Equal blocks of consecutive rows: the partition of data that comes client by client."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedspa.partition.base import Partition


@dataclass(kw_only=True)
class Blocks(Partition):
    """Client k holds the k-th of equal shares of the rows, as they come. Nothing is drawn."""

    def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return np.array_split(np.arange(len(labels)), clients)
