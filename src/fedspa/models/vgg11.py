"""VGG11 with GroupNorm, the paper's network for CIFAR-10 (9,231,114 parameters there)."""

from __future__ import annotations

import torch
from torch import nn

from fedspa.models.checking import side_lengths

WIDTHS = (64, 128, 256, 256, 512, 512, 512, 512)
POOLED = (1, 2, 4, 6, 8)
"""The convolutions, counted from 1, that are followed by max-pooling."""


class VGG11(nn.Module):
    """Eight times conv 3 x 3 with bias, GroupNorm(32), ReLU, with five poolings; one linear layer.

    Convolutions start Kaiming-normal by fan-out, the linear layer N(0, 0.01), biases 0. ReLU comes after
    max-pooling: the same function with a quarter of the work. For images larger than 32 x 32 the remaining positions
    are averaged.
    """

    def __init__(self, channels: int, image_size: int | tuple[int, int], classes: int) -> None:
        super().__init__()
        side_lengths("vgg11", image_size, 32, "its five poolings by 2 leave nothing of them")
        self.features = nn.Sequential()
        inputs = channels
        for number, width in enumerate(WIDTHS, start=1):
            self.features.add_module(f"conv{number}", nn.Conv2d(inputs, width, 3, padding=1))
            self.features.add_module(f"norm{number}", nn.GroupNorm(32, width))
            if number in POOLED:
                self.features.add_module(f"pool{number}", nn.MaxPool2d(2))
            self.features.add_module(f"relu{number}", nn.ReLU(inplace=True))
            inputs = width
        self.classifier = nn.Linear(inputs, classes)
        self._initialise()

    def _initialise(self) -> None:
        for name, tensor in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(tensor)
            elif tensor.dim() == 4:
                nn.init.kaiming_normal_(tensor, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.classifier.weight, std=0.01)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.device.type == "cpu":  # channels-last takes a fifth longer there for this many channels
            images = images.contiguous()
        return self.classifier(self.features(images).mean((2, 3)))
