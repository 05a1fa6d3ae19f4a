"""Softmax regression: one linear layer on the pixels."""

from __future__ import annotations

import torch
from torch import nn


class OneLayer(nn.Module):
    """Images [n, channels, image_size, image_size] to logits [n, classes]."""

    def __init__(self, channels: int, image_size: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels * image_size**2, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(images.flatten(1))
