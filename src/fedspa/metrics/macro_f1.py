"""Macro F1."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspa.metrics.base import Metric


@dataclass(kw_only=True)
class MacroF1(Metric):
    """F1 score, averaged over the classes that occur among a client's test labels or predictions."""

    def __call__(self, predicted: torch.Tensor, target: torch.Tensor, classes: int) -> torch.Tensor:
        from torchmetrics.functional.classification import multiclass_stat_scores

        counts = multiclass_stat_scores(
            predicted, target, classes, average="none", multidim_average="samplewise", ignore_index=-1
        )
        right, false_positives, _, false_negatives, _ = counts.double().unbind(2)
        total = 2 * right + false_positives + false_negatives
        occurs = total > 0
        return 100 * torch.where(occurs, 2 * right / total, 0).sum(1) / occurs.sum(1)
