"""A network for the 8 x 8 handwritten digits (26,090 parameters there) that trains in seconds on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fedspa.models.checking import side_lengths


class SmallCNN(nn.Module):
    """Three times conv 3 x 3 (16, 32, 64 channels), GroupNorm(8), ReLU, the last two pooled by 2; a linear layer.

    ReLU comes after max-pooling, as in LeNet5. PyTorch's default initial weights.
    """

    def __init__(self, channels: int, image_size: int | tuple[int, int], classes: int) -> None:
        super().__init__()
        height, width = side_lengths(
            "small_cnn", image_size, 4, "its two poolings by 2 leave nothing of them"
        )
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.norm1 = nn.GroupNorm(8, 16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, 32)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1)
        self.norm3 = nn.GroupNorm(8, 64)
        self.fc = nn.Linear(64 * (height // 4) * (width // 4), classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(images)), inplace=True)
        x = F.relu(F.max_pool2d(self.norm2(self.conv2(x)), 2), inplace=True)
        x = F.relu(F.max_pool2d(self.norm3(self.conv3(x)), 2), inplace=True)
        return self.fc(x.flatten(1))
