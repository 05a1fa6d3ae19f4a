"""Makes a physically small network from the active channels of a network."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fedspa.core.weights import ParameterSpace, cut_channels, flat_tensors


def narrowed(network: nn.Module, units: torch.Tensor) -> nn.Module:
    """A copy of a network that has only its active channels, with their weights.

    Its flat vector is that of the network at the coordinates of `Channels.mask`.

    Args:
        network: its channels are found (`fedspa.models.channels.set_channels`).
        units: bool [units], the active ones.
    """
    space = ParameterSpace.of(network)
    assert space.channels is not None
    small = copy.deepcopy(network)
    cut_channels(small, None)
    flags = space.channels.mask(space.tensors, units).cpu()
    for (name, tensor), (_, active) in zip(flat_tensors(small).items(), space.items(flags), strict=True):
        for axis in range(len(space.channels.axes.get(name, ()))):
            others = [other for other in range(active.dim()) if other != axis]
            places = (active.sum(others) if others else active).nonzero().squeeze(1)
            tensor.data = tensor.data.index_select(axis, places.to(tensor.device))
    for layer in small.modules():
        _fit(layer)
    return small


def _fit(layer: nn.Module) -> None:
    """Correct the numbers of channels that a layer keeps beside its weight."""
    if isinstance(layer, _ConvNd):
        outputs, inputs = layer.weight.shape[:2]
        if layer.groups > 1 and layer.groups == layer.in_channels:  # each channel has a kernel of its own
            layer.groups = outputs
        layer.in_channels, layer.out_channels = inputs * layer.groups, outputs
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.GroupNorm) and layer.affine:
        channels = len(layer.weight)
        layer.num_groups = layer.num_groups * channels // layer.num_channels
        layer.num_channels = channels
    elif isinstance(layer, _BatchNorm) and layer.affine:
        layer.num_features = len(layer.weight)
