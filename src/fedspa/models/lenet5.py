"""LeNet5 in Caffe's variant, the paper's network for EMNIST letters (439,096 parameters there)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fedspa.models.checking import side_lengths
from fedspa.models.conv_pool import ConvPool


class LeNet5(nn.Module):
    """Twice conv 5 x 5 unpadded (20, 50 channels), pooling by 2, ReLU; linear to 500, ReLU; linear.

    PyTorch's default initial weights.
    """

    def __init__(self, channels: int, image_size: int | tuple[int, int], classes: int) -> None:
        super().__init__()
        sides = side_lengths("lenet5", image_size, 16, "its convolutions and poolings leave nothing of them")
        # A 5 x 5 kernel takes 4 pixels, a pooling half of the rest.
        height, width = (((side - 4) // 2 - 4) // 2 for side in sides)
        self.conv1 = nn.Conv2d(channels, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc3 = nn.Linear(50 * height * width, 500)
        self.fc4 = nn.Linear(500, classes)
        self.pooled = ConvPool()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.pooled(self.conv2, self.pooled(self.conv1, images))
        x = F.relu(self.fc3(x.flatten(1)), inplace=True)
        return self.fc4(x)
