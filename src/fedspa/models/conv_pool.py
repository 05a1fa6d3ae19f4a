"""A convolution, max-pooling by 2 and ReLU, which an engine may have computed in one."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn


class Kernel(Protocol):
    """Computes the three layers in one, with a gradient."""

    def serves(self, convolution: nn.Conv2d, images: torch.Tensor) -> bool:
        """Whether it is the way for these layers and images."""

    def __call__(self, convolution: nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
        """What `ConvPool` gives."""


class ConvPool(nn.Module):
    """ReLU of what max-pooling by 2 makes of a convolution, which stays a layer of the network's own.

    ReLU comes after max-pooling: the two commute, and there it has a quarter of the work.
    """

    kernel: Kernel | None = None
    """Set by the engine."""

    def forward(self, convolution: nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
        """Of images [B, C, H, W]: [B, channels of the convolution, h // 2, w // 2], of its [h, w]."""
        if self.kernel is not None and self.kernel.serves(convolution, images):
            return self.kernel(convolution, images)
        return F.relu(F.max_pool2d(convolution(images), 2), inplace=True)
