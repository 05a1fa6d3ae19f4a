"""What every metric is: a score of many clients in one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(kw_only=True)
class Metric(ABC):
    """A score of each client on its own test set."""

    name: str

    @abstractmethod
    def __call__(self, predicted: torch.Tensor, target: torch.Tensor, classes: int) -> torch.Tensor:
        """The score of each of K clients, in percent: float [K].

        `predicted` and `target` are classes, int64 [K, n]. Test sets shorter than n are padded, which
        `target` marks by -1 (what `predicted` holds there does not matter).
        """
