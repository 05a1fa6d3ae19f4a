"""ResNet18 with GroupNorm and CIFAR stem, the paper's network for CIFAR-100 (11,220,132 parameters there)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fedspa.models.checking import side_lengths


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut. The shortcut is a 1 x 1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(32, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(32, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.add_module("conv", nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.add_module("norm", nn.GroupNorm(32, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet18(nn.Module):
    """A 3 x 3 stem without pooling, four stages of two blocks, the mean over positions, one linear layer.

    GroupNorm(32) replaces every BatchNorm of ResNet, also in shortcuts. PyTorch's default initial weights.
    """

    def __init__(self, channels: int, image_size: int | tuple[int, int], classes: int) -> None:
        super().__init__()
        side_lengths("resnet18", image_size, 8, "its three strides of 2 would run on a single pixel")
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(32, 64)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.fc = nn.Linear(512, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.device.type == "cpu":  # channels-last is slower there for this many channels
            images = images.contiguous()
        x = F.relu(self.norm1(self.conv1(images)), inplace=True)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))
