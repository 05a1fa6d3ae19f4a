"""The objective of the training, by the targets of the data: cross-entropy for classes, squared error for numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from fedspa.core.errors import UserError
from fedspa.data.examples import Examples


class Objective(ABC):
    """A loss, and the predictions from a network's outputs."""

    @abstractmethod
    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch, with a graph. Filler rows do not count (see `Examples.filled_up`)."""

    @abstractmethod
    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """The prediction for each example, with shape and dtype of the targets."""


class Classification(Objective):
    """Cross-entropy of logits [B, classes]. The prediction is the most likely class, int64 [B]."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.argmax(dim=1)


class Regression(Objective):
    """Mean squared error over the examples and their K outputs, float [B, K]; [B] if K is 1."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        known = ~targets.isnan()
        error = torch.where(known, _like(outputs, targets.shape) - targets, 0)
        return error.square().sum() / known.sum()

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.reshape(len(outputs), -1)


def _like(outputs: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The outputs in the shape of the targets. Torch would broadcast other shapes to a wrong loss."""
    if outputs.numel() != shape.numel():
        raise UserError(
            f"The model makes {tuple(outputs.shape)} of a batch whose targets are {tuple(shape)}: it must make one "
            "number for each of them."
        )
    return outputs.reshape(shape)


def objective_for(examples: Examples) -> Objective:
    """The objective for the kind of targets."""
    return Regression() if examples.of_numbers else Classification()
