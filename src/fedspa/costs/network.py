"""The costs of a network in FLOPs and bytes, in closed form and in exact integers.

Forward FLOPs of one sample are the sum over convolutions and linear layers of (2 x active weights + active
biases) x output positions; norms, activations, poolings, sums and the lookups of embeddings are free. Training costs
three times the forward pass. A parameter travels as 4 bytes. The paper's tables follow from this to the printed digit.

Other layers with parameters, such as attention and recurrent ones, cannot be counted: then all FLOPs are None.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from fedspa.core.records import plus, times
from fedspa.core.settings import CostSettings
from fedspa.core.weights import ParameterSpace

Counted: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear
FREE = (
    *(nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.PReLU, nn.modules.batchnorm._NormBase),
    *(nn.Embedding, nn.EmbeddingBag),
)
"""Layers with parameters that cost no FLOPs, as in the paper.
An embedding only reads rows of its table."""

TRAINING_FACTOR = 3
"""The cost of a forward and a backward pass, in forward passes."""
VALUE_BYTES = 4


@dataclass(frozen=True)
class NetworkCosts:
    """The costs of one network. `active` is always the number of active parameters of each tensor, in the
    order of `ParameterSpace`; None stands for the dense network."""

    sizes: tuple[int, ...]
    """The length of each tensor that travels: the parameters, then BatchNorm's running statistics (see
    `ParameterSpace.shared`)."""
    flops_per_active: tuple[int, ...]
    """The forward FLOPs of one sample for one active parameter of each tensor."""
    convention: str = "honest"
    """honest counts all values and masks that travel; paper leaves masks out."""

    personal_flops: tuple[int, ...] = ()
    """The forward FLOPs of one sample for each personal parameter tensor. Personal tensors are dense."""
    statistics: int = 0
    """The number of values in running statistics. They travel as parameters do, and are never masked."""
    mask_units: int | None = None
    """The bits of a mask that cuts out channels, a bit for each unit of channels; None: a bit for each parameter."""
    uncounted: tuple[str, ...] = ()
    """The layers whose FLOPs cannot be counted, by path and kind. If there are any, all FLOPs are None."""

    @classmethod
    def of(
        cls,
        network: nn.Module,
        input_shape: tuple[int, ...],
        convention: str = "honest",
        input_dtype: torch.dtype | None = None,
    ) -> NetworkCosts:
        """Measure a network by one forward pass of a copy. The network itself does not change.

        `input_shape` and `input_dtype` describe one sample, such as channels, height, width. The default dtype is
        that of the weights. Only layers are counted: products of plain functions are not.
        """
        space = ParameterSpace.of(network).shared
        by_name, uncounted = _flops_per_active(network, input_shape, input_dtype)
        flops = tuple(by_name.get(name, 0) for name in space.names)
        sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
        personal = tuple(by_name[name] * sizes[name] for name in sizes if name not in space.names)
        units = None if space.channels is None else space.channels.total
        convention = CostSettings(convention).convention  # refuses an unknown one
        return cls(space.sizes, flops, convention, personal, space.total - space.trained, units, uncounted)

    @property
    def parameters(self) -> int:
        return sum(self.sizes) - self.statistics

    @property
    def remark(self) -> str:
        """The warning that FLOPs are not counted; "" if they are."""
        if not self.uncounted:
            return ""
        return f"FLOPs stay blank, because these layers cannot be counted: {', '.join(self.uncounted)}"

    def forward_flops(self, active: Sequence[int] | None = None) -> int | None:
        """The FLOPs of the forward pass of one sample."""
        if self.uncounted:
            return None
        counts = self.sizes if active is None else active
        shared = sum(flops * count for flops, count in zip(self.flops_per_active, counts, strict=True))
        return shared + sum(self.personal_flops)

    def training_flops(
        self,
        active: Sequence[int] | None,
        samples: int,
        forward: Sequence[int] | None = None,
        further_passes: int = 0,
    ) -> int | None:
        """The FLOPs of training on so many samples (epochs x rows).

        Args:
            forward: active parameters in the forward pass and in the gradient of its inputs, if they are fewer than
                those with a gradient of their own.
            further_passes: forward passes for each sample beside those of plain training.
        """
        forward_passes = TRAINING_FACTOR - 1 + further_passes
        passes = times(self.forward_flops(active if forward is None else forward), forward_passes * samples)
        return plus(passes, times(self.forward_flops(active), samples))

    def search_flops(self, samples: int) -> int | None:
        """The FLOPs of one mask search: the dense gradient of so many samples, at dense cost as in the paper."""
        return self.training_flops(None, samples)

    def value_bytes(self, active: Sequence[int] | None = None) -> int:
        """The bytes of the active values, one way."""
        return VALUE_BYTES * sum(self.sizes if active is None else active)

    def mask_bytes(self, active: Sequence[int]) -> int:
        """The bytes of a mask, one way: a bit for each parameter of the tensors neither full nor empty; or for each
        unit of channels, if any is inactive."""
        if self.convention == "paper":
            return 0
        bits = sum(size for size, count in zip(self.sizes, active, strict=True) if 0 < count < size)
        if bits and self.mask_units is not None:
            bits = self.mask_units
        return (bits + 7) // 8


def _flops_per_active(
    network: nn.Module, input_shape: tuple[int, ...], input_dtype: torch.dtype | None
) -> tuple[dict[str, int], tuple[str, ...]]:
    """The forward FLOPs of one active parameter by tensor name, and the layers that cannot be counted.

    A weight costs twice the output positions, and a bias once. The uses of a shared tensor are added up.
    """
    probe = copy.deepcopy(network).eval()  # hooks and mode do not reach the network itself
    names = {id(parameter): name for name, parameter in probe.named_parameters()}
    flops = dict.fromkeys(names.values(), 0)
    uncounted: dict[nn.Module, str] = {}

    def charge(layer: Counted, _inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        uncounted.pop(layer, None)
        positions = output.numel() // layer.weight.shape[0]
        flops[names[id(layer.weight)]] += 2 * positions
        if layer.bias is not None:
            flops[names[id(layer.bias)]] += positions

    for path, layer in probe.named_modules():
        if any(True for _ in layer.parameters(recurse=False)) and not isinstance(layer, FREE):
            uncounted[layer] = f"{path or 'the model itself'} ({type(layer).__name__})"
        if isinstance(layer, Counted):
            layer.register_forward_hook(charge)  # a layer that is never called stays uncounted
    weight = next(probe.parameters())
    with torch.no_grad():
        probe(torch.zeros(1, *input_shape, dtype=input_dtype or weight.dtype, device=weight.device))
    return flops, tuple(uncounted.values())
