"""A client's model as a plain module, with the facts about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedspa.core.randomness import generator
from fedspa.core.weights import ParameterSpace
from fedspa.data.source import Source


class Normalise(nn.Module):
    """(pixels - mean) / std of each channel, for pixels in [0, 1]: float [B, C, H, W]."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """`mean` and `std`: one value for each channel, or one for all."""
        super().__init__()
        self.register_buffer("mean", torch.tensor(list(mean)).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(list(std)).view(1, -1, 1, 1))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return (pixels - self.mean) / self.std


class Mixed(nn.Module):
    """Two networks in one: alpha f(personal) + (1 - alpha) f(shared), where f are their outputs."""

    def __init__(self, personal: nn.Module, shared: nn.Module, alpha: float) -> None:
        super().__init__()
        self.personal, self.shared, self.alpha = personal, shared, alpha

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.lerp(self.shared(inputs), self.personal(inputs), self.alpha)


@dataclass(frozen=True, eq=False)
class ClientModel:
    """A model that is ready to be written to a file."""

    module: nn.Sequential
    """The model in evaluation mode: `normalise` (for images), then the run's `network`. It maps inputs to logits or
    numbers.

    Images are pixels in [0, 1], float32 [B, C, H, W]; features are standardised float32 [B, F]; tokens int64 [B, L].
    """
    space: ParameterSpace
    active: tuple[int, ...]
    """The number of active values of each tensor in the flat weights, with running statistics."""
    make: str
    """The dotted path of the network's maker."""
    arguments: dict[str, Any]
    batchnorm: str | None
    source: Source
    """The run's data source: shape and dtype of the inputs, and the normalisation of images."""
    class_names: tuple[str, ...]
    """Empty if the run does not know them."""
    alpha: float | None = None
    """For a mixture: the share of `network.personal`. The other network is `network.shared`."""

    def inputs(self, count: int) -> torch.Tensor:
        """Random inputs for a check of the model: [count, *input_shape]."""
        drawn = torch.rand(count, *self.source.input_shape, generator=generator(0, "export_check"))
        if self.source.input_dtype is None:
            return drawn
        return (drawn * self.source.model_facts["vocabulary"]).to(self.source.input_dtype)

    @property
    def parameters(self) -> int:
        return self.space.trained

    @property
    def active_parameters(self) -> int:
        return sum(self.active[: len(self.active) - self.space.statistics])

    @property
    def density(self) -> float:
        """The share of the parameters that are active."""
        return self.active_parameters / self.parameters

    @property
    def dense_bytes(self) -> int:
        """The bytes of all values, with running statistics, 4 bytes each."""
        return 4 * self.space.total

    @property
    def packed_bytes(self) -> int:
        """The bytes of the active values and of one bit for each value; a dense model needs no bits."""
        if sum(self.active) == self.space.total:
            return self.dense_bytes
        return 4 * sum(self.active) + -(-self.space.total // 8)
