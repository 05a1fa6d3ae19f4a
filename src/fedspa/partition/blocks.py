"""Equal blocks of consecutive rows, for data that is sorted by client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedspa.partition.base import Partition


@dataclass(kw_only=True)
class Blocks(Partition):
    """Client k gets the k-th of equal shares of the rows, in their order. Nothing is drawn."""

    by_label: ClassVar[bool] = False

    def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return np.array_split(np.arange(len(labels)), clients)
