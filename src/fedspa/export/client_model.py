"""A client's model as a plain module, and what is to be said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedspa.core.weights import ParameterSpace


class Normalise(nn.Module):
    """(pixels - mean) / std of each channel, for pixels in [0, 1]: float [B, C, H, W]."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """One value for each channel, or one for all."""
        super().__init__()
        self.register_buffer("mean", torch.tensor(list(mean)).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(list(std)).view(1, -1, 1, 1))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return (pixels - self.mean) / self.std


@dataclass(frozen=True, eq=False)
class ClientModel:
    """A model that is ready to be written."""

    module: nn.Sequential
    """In evaluation: `normalise`, then the run's `network`. From pixels in [0, 1], float32 [B, C, H, W], to logits."""
    space: ParameterSpace
    active: tuple[int, ...]
    """Of each tensor of the flat weights: how many values are active, running statistics included."""
    make: str
    """Dotted path of what makes the network."""
    arguments: dict[str, Any]
    batchnorm: str | None
    image_shape: tuple[int, int, int]
    """Channels, height, width."""
    classes: int
    class_names: tuple[str, ...]
    """Empty where the run does not know them."""
    mean: list[float]
    std: list[float]

    @property
    def parameters(self) -> int:
        return self.space.trained

    @property
    def active_parameters(self) -> int:
        return sum(self.active[: len(self.active) - self.space.statistics])

    @property
    def density(self) -> float:
        """Share of the parameters that are active."""
        return self.active_parameters / self.parameters

    @property
    def dense_bytes(self) -> int:
        """Of all values, running statistics included, 4 bytes each."""
        return 4 * self.space.total

    @property
    def packed_bytes(self) -> int:
        """Of the active values, and of a bit a value that says which they are; a dense model needs no bits."""
        if sum(self.active) == self.space.total:
            return self.dense_bytes
        return 4 * sum(self.active) + -(-self.space.total // 8)
