"""Finds the channels of a network that can be cut, and checks that the network works without them."""

from __future__ import annotations

import copy
import logging
from collections import Counter, defaultdict
from collections.abc import Collection
from itertools import chain

import torch
from torch import nn

from fedspa.core.channels import Channels
from fedspa.core.errors import UserError, brief
from fedspa.core.weights import ParameterSpace, cut_channels
from fedspa.models.channel_labels import WHOLE, Labels
from fedspa.models.narrowing import narrowed

logger = logging.getLogger(__name__)


def set_channels(network: nn.Module, inputs: torch.Tensor) -> None:
    """Find the channels of a network that can be cut. `ParameterSpace.of(network)` then has them.

    `inputs`: two examples. Raises `UserError` if torch cannot record the network, if nothing can be cut, or if the
    network does not work with fewer channels.
    """
    probe = copy.deepcopy(network).eval()
    try:
        labels = Labels(torch.export.export(probe, (inputs,)).module())
        labels.run(inputs)
    except Exception as error:  # any error of torch with a user's network
        raise UserError(
            f"mask=channels cannot follow what the model computes ({brief(error)}): use mask=dst or another model."
        ) from error
    space = ParameterSpace.of(network)
    kept = space.names[len(space.names) - space.kept :]
    channels = _units(labels, space, [*labels.whole_tensors, *kept])
    if not channels.groups:
        raise UserError(
            "mask=channels finds no channels in the model that can be cut"
            f"{' (personal layers stay whole)' if kept else ''}: use mask=dst."
        )
    dense = [name for name in space.parameters.names if name not in channels.axes]
    logger.info("mask=channels leaves these tensors whole: %s.", ", ".join(dense) or "none")
    cut_channels(network, channels)
    _check(probe, channels, inputs)


def _check(probe: nn.Module, channels: Channels, inputs: torch.Tensor) -> None:
    """Raise `UserError` unless half of the channels compute the same as the network without the other half.

    `probe`: a copy of the network in evaluation mode, whose weights change here.
    """
    source = torch.Generator().manual_seed(0)
    space = ParameterSpace.of(probe.double())
    cut_channels(probe, channels)
    units = torch.cat([torch.randperm(n, generator=source) < (n + 1) // 2 for n in channels.groups])
    if inputs.is_floating_point():
        inputs = torch.rand(inputs.shape, generator=source, dtype=torch.float64)
    active = dict(space.items(channels.mask(space.tensors, units)))
    with torch.no_grad():
        for name, parameter in probe.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=source, dtype=torch.float64), alpha=0.1)
            parameter.mul_(active[name])
        try:
            same = torch.allclose(narrowed(probe, units)(inputs), probe(inputs))
            why = "" if same else "it computes something else"
        except RuntimeError as error:
            why = brief(error)
    if why:
        raise UserError(
            f"mask=channels cannot make the model narrower ({why}): use mask=dst, or a model whose forward pass "
            "takes numbers of channels from its activations."
        )


def _units(labels: Labels, space: ParameterSpace, whole: Collection[str]) -> Channels:
    """The joined channels as units. Those with equal numbers of indices along the same axes make a group."""
    for name in whole:
        labels.keep_whole(labels.axes.get(name, ()))
    roots = {
        name: [[labels.root(label) for label in axis.tolist()] for axis in labels.axes[name]]
        for name in space.names
        if name in labels.axes
    }
    places: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for name, axes in roots.items():
        for axis, found in enumerate(axes):
            for root, count in Counter(found).items():
                places[root].append((name, axis, count))
    places.pop(WHOLE, None)
    alike: dict[tuple[tuple[str, int, int], ...], list[int]] = defaultdict(list)
    for root in sorted(places):
        alike[tuple(places[root])].append(root)
    groups = [members for members in alike.values() if len(members) > 1]  # one of them must stay active
    number = {root: i for i, root in enumerate(chain(*groups))}
    cut = {name: axes for name, axes in roots.items() if not number.keys().isdisjoint(chain(*axes))}
    units = {
        name: tuple(torch.tensor([number.get(root, len(number)) for root in axis]) for axis in axes)
        for name, axes in cut.items()
    }
    return Channels(tuple(map(len, groups)), units)
