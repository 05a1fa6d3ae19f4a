"""Independent and identically distributed clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedspa.partition.base import Partition


@dataclass(kw_only=True)
class Iid(Partition):
    """One permutation of all rows, cut into equal shares (they differ by one if N/K is not whole)."""

    by_label: ClassVar[bool] = False

    def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return np.array_split(rng.permutation(len(labels)), clients)
