"""What every metric is: a score of many clients in one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(kw_only=True)
class Metric(ABC):
    """A score of each client on its own test set."""

    name: str
    higher_is_better: ClassVar[bool] = True
    of_numbers: ClassVar[bool] = False
    """Whether it compares numbers (a regression), not classes."""

    @abstractmethod
    def __call__(self, predicted: torch.Tensor, target: torch.Tensor, classes: int) -> torch.Tensor:
        """The score of each of K clients: float [K], of classes in percent.

        `predicted` and `target` are classes, int64 [K, n], or numbers, float [K, n, outputs]. Test sets shorter than n
        are padded, which `target` marks by -1 or NaN (what `predicted` holds there does not matter).
        """


def mean_error(errors: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Each client's mean of errors [K, n, outputs] without those of padding, where the target is NaN: float64 [K]."""
    known = ~target.isnan()
    return torch.where(known, errors.double(), 0).flatten(1).sum(1) / known.flatten(1).sum(1)
