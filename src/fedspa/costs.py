"""What a network costs in FLOPs and bytes, in closed form and in exact integers.

Forward FLOPs of one sample are the sum over convolutions and linear layers of (2 x active weights + active
biases) x output positions; norms, activations, poolings and sums are free. Training costs three times the
forward pass. A parameter travels as 4 bytes. With this the paper's tables come out to the printed digit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedspa.errors import UserError, check_choice

COUNTED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
FREE = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.PReLU, nn.modules.batchnorm._NormBase)
"""Layers with parameters whose work is left out, as the paper leaves it out."""

TRAINING_FACTOR = 3
"""Forward and backward pass in forward passes."""
VALUE_BYTES = 4


@dataclass(frozen=True)
class NetworkCosts:
    """The costs of one network. `active` is always the number of active parameters of each tensor, in the order
    of `named_parameters`; None stands for the dense network."""

    sizes: tuple[int, ...]
    """Parameters of each tensor."""
    flops_per_active: tuple[int, ...]
    """Forward FLOPs a sample that one active parameter of each tensor causes."""
    convention: str = "honest"
    """honest counts what really travels; paper leaves masks out."""

    def __post_init__(self) -> None:
        check_choice("costs.convention", self.convention, ("honest", "paper"))

    @classmethod
    def of(
        cls, network: nn.Module, input_shape: tuple[int, int, int], convention: str = "honest"
    ) -> NetworkCosts:
        """Measure a network by one forward pass of shapes (nothing is computed, the network stays untouched).

        `input_shape` is that of one sample: channels, height, width. Raises `UserError` that names the layer, or
        the FLOPs, that it cannot count.
        """
        sizes = tuple(p.numel() for p in network.parameters())
        return cls(sizes, _flops_per_active(network, input_shape), convention)

    @property
    def parameters(self) -> int:
        return sum(self.sizes)

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
        """Bytes of a mask, one way: a bit for each parameter of the tensors that are neither full nor empty."""
        if self.convention == "paper":
            return 0
        bits = sum(size for size, count in zip(self.sizes, active, strict=True) if 0 < count < size)
        return (bits + 7) // 8


def _flops_per_active(network: nn.Module, input_shape: tuple[int, int, int]) -> tuple[int, ...]:
    """Twice the output positions for a weight, once for a bias, summed over the uses of a shared tensor."""
    index = {id(p): i for i, p in enumerate(network.parameters())}
    flops = [0] * len(index)
    weight_flops = 0
    uses, total_flops = _trace(network, input_shape)
    for layer, positions in uses:
        flops[index[id(layer.weight)]] += 2 * positions
        weight_flops += 2 * positions * layer.weight.numel()
        if layer.bias is not None:
            flops[index[id(layer.bias)]] += positions
    if weight_flops != total_flops:
        raise UserError(
            f"costs cannot count {type(network).__name__}: PyTorch sees {total_flops} FLOPs in a forward pass but its "
            f"convolutions and linear layers make {weight_flops}; products must be made by calling such layers."
        )
    return tuple(flops)


def _trace(network: nn.Module, input_shape: tuple[int, int, int]) -> tuple[list[tuple[nn.Module, int]], int]:
    """Each call of a counted layer with its output positions, and the FLOPs (without biases) that PyTorch sees."""
    uses: list[tuple[nn.Module, int]] = []
    probe = copy.deepcopy(network).to("meta").eval()
    for (path, layer), twin in zip(network.named_modules(), probe.modules(), strict=True):
        if isinstance(layer, COUNTED):
            twin.register_forward_hook(
                lambda _, inputs, output, layer=layer: uses.append((layer, output.numel() // layer.weight.shape[0]))
            )
        elif not isinstance(layer, FREE) and any(True for _ in layer.parameters(recurse=False)):
            raise UserError(
                f"costs cannot count the layer {path or 'at the root'} ({type(layer).__name__}): parameters may sit "
                "in convolutions, linear layers and norms only."
            )
    dtype = next(network.parameters()).dtype
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        probe(torch.empty(1, *input_shape, device="meta", dtype=dtype))
    return uses, counter.get_total_flops()
