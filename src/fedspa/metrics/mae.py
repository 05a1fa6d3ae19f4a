"""Mean absolute error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedspa.metrics.base import Metric, mean_error


@dataclass(kw_only=True)
class MeanAbsoluteError(Metric):
    """The absolute error, averaged over a client's test examples and outputs, in units of the targets."""

    higher_is_better: ClassVar[bool] = False
    of_numbers: ClassVar[bool] = True

    def __call__(self, predicted: torch.Tensor, target: torch.Tensor, classes: int) -> torch.Tensor:
        return mean_error((predicted.double() - target.double()).abs(), target)
