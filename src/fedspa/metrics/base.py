"""The base class of metrics: one call scores many clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(kw_only=True)
class Metric(ABC):
    """A score of each client on its test set."""

    name: str
    higher_is_better: ClassVar[bool] = True
    of_numbers: ClassVar[bool] = False
    """True if the metric compares numbers (a regression), not classes."""

    @abstractmethod
    def __call__(self, predicted: torch.Tensor, target: torch.Tensor, classes: int) -> torch.Tensor:
        """The score of each of K clients: float64 [K]; in percent for classes.

        `predicted` and `target` are classes, int64 [K, n], or numbers, float [K, n, outputs]. Test sets shorter than n
        are padded. Padding has the target -1 or NaN; its value in `predicted` does not count.
        """


def mean_error(errors: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean of each client's errors [K, n, outputs] without padding, where the target is NaN: float64 [K]."""
    known = ~target.isnan()
    return torch.where(known, errors.double(), 0).flatten(1).sum(1) / known.flatten(1).sum(1)
