"""A convolution, max-pooling by 2 and ReLU, which an engine may compute in one operation."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn


class Kernel(Protocol):
    """Computes the three layers in one operation, with a gradient."""

    def serves(self, convolution: nn.Conv2d, images: torch.Tensor) -> bool:
        """True if the kernel can compute these layers and images."""

    def __call__(self, convolution: nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
        """The result of `ConvPool`."""


class ConvPool(nn.Module):
    """ReLU of max-pooling by 2 of a convolution. The convolution stays a layer of the network.

    ReLU comes after max-pooling. The result is the same, with a quarter of ReLU's work.
    """

    kernel: Kernel | None = None
    """Set by the engine."""

    def forward(self, convolution: nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
        """The result for images [B, C, H, W]: [B, outputs, h // 2, w // 2] if the convolution makes [h, w]."""
        if self.kernel is not None and self.kernel.serves(convolution, images):
            return self.kernel(convolution, images)
        return F.relu(F.max_pool2d(convolution(images), 2), inplace=True)
