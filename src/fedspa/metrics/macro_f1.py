"""Macro F1."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspa.metrics.base import Metric


@dataclass(kw_only=True)
class MacroF1(Metric):
    """F1 score, averaged over the classes that occur among a client's test labels or predictions."""

    def __call__(self, predicted: torch.Tensor, target: torch.Tensor, classes: int) -> torch.Tensor:
        from torchmetrics.functional.classification import multiclass_f1_score

        return 100 * multiclass_f1_score(
            predicted, target, classes, average="macro", multidim_average="samplewise", ignore_index=-1
        )
