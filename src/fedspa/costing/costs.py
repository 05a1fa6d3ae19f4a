"""What a network costs in FLOPs and bytes, in closed form and in exact integers.

Forward FLOPs of one sample are the sum over convolutions and linear layers of (2 x active weights + active
biases) x output positions; norms, activations, poolings and sums are free. Training costs three times the
forward pass. A parameter travels as 4 bytes. With this the paper's tables come out to the printed digit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from fedspa.errors import UserError, check_choice
from fedspa.weights import ParameterSpace

Counted: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear
FREE = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.PReLU, nn.modules.batchnorm._NormBase)
"""Layers with parameters whose work is left out, as the paper leaves it out."""

TRAINING_FACTOR = 3
"""Forward and backward pass in forward passes."""
VALUE_BYTES = 4


@dataclass(frozen=True)
class NetworkCosts:
    """The costs of one network. `active` is always the number of active parameters of each tensor, in the
    order of `ParameterSpace`; None stands for the dense network."""

    sizes: tuple[int, ...]
    """Length of each tensor that travels: of the parameters, then of BatchNorm's running statistics (see
    `ParameterSpace.shared`)."""
    flops_per_active: tuple[int, ...]
    """Forward FLOPs a sample that one active parameter of each tensor causes."""
    convention: str = "honest"
    """honest counts what really travels; paper leaves masks out."""

    statistics: int = 0
    """How many values are running statistics: they travel as parameters do, and no mask reaches them."""

    def __post_init__(self) -> None:
        check_choice("costs.convention", self.convention, ("honest", "paper"))

    @classmethod
    def of(
        cls, network: nn.Module, input_shape: tuple[int, int, int], convention: str = "honest"
    ) -> NetworkCosts:
        """Measure a network by one forward pass of a copy (the network itself stays untouched).

        `input_shape` is that of one sample: channels, height, width. Raises `UserError` that names a layer
        which it cannot count. Only layers are seen: products made by bare functions are not counted.
        """
        space = ParameterSpace.of(network).shared  # BatchNorm, which clients may keep, is free
        by_name = _flops_per_active(network, input_shape)
        flops = tuple(by_name.get(name, 0) for name in space.names)
        return cls(space.sizes, flops, convention, space.total - space.trained)

    @property
    def parameters(self) -> int:
        return sum(self.sizes) - self.statistics

    def forward_flops(self, active: Sequence[int] | None = None) -> int:
        """FLOPs of the forward pass of one sample."""
        counts = self.sizes if active is None else active
        return sum(flops * count for flops, count in zip(self.flops_per_active, counts, strict=True))

    def training_flops(self, active: Sequence[int] | None, samples: int) -> int:
        """FLOPs of training on so many samples (epochs x rows)."""
        return TRAINING_FACTOR * self.forward_flops(active) * samples

    def search_flops(self, samples: int) -> int:
        """FLOPs of one mask search: the dense gradient of so many samples, at dense cost as in the paper."""
        return self.training_flops(None, samples)

    def value_bytes(self, active: Sequence[int] | None = None) -> int:
        """Bytes of the active values, one way."""
        return VALUE_BYTES * sum(self.sizes if active is None else active)

    def mask_bytes(self, active: Sequence[int]) -> int:
        """Bytes of a mask, one way: a bit for each parameter of the tensors neither full nor empty."""
        if self.convention == "paper":
            return 0
        bits = sum(size for size, count in zip(self.sizes, active, strict=True) if 0 < count < size)
        return (bits + 7) // 8


def _flops_per_active(network: nn.Module, input_shape: tuple[int, int, int]) -> dict[str, int]:
    """By name: twice the output positions for a weight, once for a bias, summed over the uses of a shared tensor."""
    probe = copy.deepcopy(network).eval()  # hooks and mode die with the copy
    names = {id(parameter): name for name, parameter in probe.named_parameters()}
    flops = dict.fromkeys(names.values(), 0)
    silent: dict[nn.Module, str] = {}

    def charge(layer: Counted, _inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        silent.pop(layer, None)
        positions = output.numel() // layer.weight.shape[0]
        flops[names[id(layer.weight)]] += 2 * positions
        if layer.bias is not None:
            flops[names[id(layer.bias)]] += positions

    for path, layer in probe.named_modules():
        if isinstance(layer, Counted):
            silent[layer] = path
            layer.register_forward_hook(charge)
        elif not isinstance(layer, FREE) and layer._parameters:
            raise UserError(
                f"costs cannot count the layer {path or 'at the root'} ({type(layer).__name__}): "
                "parameters may sit in convolutions, linear layers and norms only."
            )
    weight = next(probe.parameters())
    with torch.no_grad():
        probe(torch.zeros(1, *input_shape, dtype=weight.dtype, device=weight.device))
    if silent:
        raise UserError(
            f"costs cannot count the layer {', '.join(silent.values())}: "
            "the forward pass never calls it as a layer."
        )
    return flops
