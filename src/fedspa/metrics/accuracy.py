"""Accuracy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspa.metrics.base import Metric


@dataclass(kw_only=True)
class Accuracy(Metric):
    """The share of a client's test images that are classified correctly."""

    def __call__(self, predicted: torch.Tensor, target: torch.Tensor, classes: int) -> torch.Tensor:
        from torchmetrics.functional.classification import multiclass_stat_scores

        counts = multiclass_stat_scores(
            predicted, target, classes, average="micro", multidim_average="samplewise", ignore_index=-1
        )
        right, _, _, _, tested = counts.double().unbind(1)
        return 100 * right / tested
