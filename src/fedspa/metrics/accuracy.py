"""Accuracy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspa.metrics.base import Metric


@dataclass(kw_only=True)
class Accuracy(Metric):
    """Share of a client's test images that are classified rightly."""

    def __call__(self, predicted: torch.Tensor, target: torch.Tensor, classes: int) -> torch.Tensor:
        from torchmetrics.functional.classification import multiclass_accuracy

        return 100 * multiclass_accuracy(
            predicted, target, classes, average="micro", multidim_average="samplewise", ignore_index=-1
        )
