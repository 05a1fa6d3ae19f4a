"""The place of each tensor of a network in one flat vector.

fedspa treats weights, gradients, updates and masks as flat vectors of one length. Only the network itself has shaped
tensors, which are views. The parameters come first. The running statistics of BatchNorm follow, if there are any. They
travel, are merged, tested and saved with the weights. But no step trains them and no mask prunes them, so masks are 1
and gradients 0 there.

Personal layers (`keep_personal`) come last, parameters before statistics. Then the flat vectors of the server, methods,
masks and messages are the shared part before them. Only engines use the whole vector.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fedspa.core.channels import Channels
from fedspa.core.errors import UserError

_PERSONAL = "_personal_tensors"
"""The attribute of a network with the names of its personal tensors."""
_CHANNELS = "_channels"
"""The attribute of a network with the channels that masks cut out."""


@dataclass(frozen=True)
class ParameterSpace:
    """The names and shapes of the tensors, in their order in the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    statistics: int = 0
    """The number of running statistics. They are the last tensors."""
    kept: int = 0
    """The number of personal tensors. They are the last ones: all running statistics, and parameters before them."""
    channels: Channels | None = field(default=None, compare=False)
    """The channels of the network, if masks cut out whole channels."""

    @classmethod
    def of(cls, network: torch.nn.Module) -> ParameterSpace:
        """The space of a network: `flat_tensors` in their order.

        Raises `UserError` for a network with other state (see `running_statistics`).
        """
        tensors, local = flat_tensors(network), _personal_names(network)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
        statistics, kept = len(running_statistics(network)), sum(name in local for name in tensors)
        return cls(tuple(tensors), shapes, statistics, kept, getattr(network, _CHANNELS, None))

    @property
    def shared(self) -> ParameterSpace:
        """The tensors that the server has too: the first coordinates."""
        if not self.kept:
            return self
        return ParameterSpace(self.names[: -self.kept], self.shapes[: -self.kept], channels=self.channels)

    @property
    def parameters(self) -> ParameterSpace:
        """The parameters alone: the first `trained` coordinates."""
        if not self.statistics:
            return self
        names, shapes = self.names[: -self.statistics], self.shapes[: -self.statistics]
        return ParameterSpace(names, shapes, channels=self.channels)

    @property
    def running(self) -> ParameterSpace:
        """The running statistics alone: the last coordinates."""
        first = len(self.names) - self.statistics
        return ParameterSpace(self.names[first:], self.shapes[first:])

    @cached_property
    def trained(self) -> int:
        """The number of parameters. They come before the running statistics."""
        return sum(self.sizes[: len(self.sizes) - self.statistics])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The length of each tensor's piece."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def total(self) -> int:
        """The length of the flat vector."""
        return sum(self.sizes)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by name."""
        return dict(zip(self.names, self.shapes, strict=True))

    def split(self, vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The flat pieces of a vector [total], one view for each tensor."""
        return torch.split(vector, list(self.sizes))

    def items(self, vector: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The name and shaped view of each tensor in a vector [total]."""
        for name, shape, piece in zip(self.names, self.shapes, self.split(vector), strict=True):
            yield name, piece.view(shape)

    def count(self, mask: torch.Tensor) -> tuple[int, ...]:
        """The active parameters of each tensor under a mask [total] of zeros and ones."""
        return tuple(self.counts(mask).tolist())

    def counts(self, mask: torch.Tensor) -> torch.Tensor:
        """The active parameters of each tensor: int64 [tensors] on the mask's device, without waiting for it."""
        flags = mask.bool()  # torch counts these ten times as fast as floats
        if mask.device.type != "cpu":  # a count for each tensor would cost launches there
            return self.counts_by_sums(flags)
        return torch.stack([piece.count_nonzero() for piece in self.split(flags)])

    @property
    def mask_sizes(self) -> tuple[int, ...]:
        """The numbers of bits that describe a mask: one for each parameter of a tensor, or for each unit of a group of
        channels."""
        return self.sizes if self.channels is None else self.channels.groups

    def mask_bits(self, mask: torch.Tensor) -> torch.Tensor:
        """The bits that describe a mask [total]: [sum of mask_sizes] in its dtype."""
        if self.channels is None:
            return mask
        return (self.channels.sums(self.parameters.tensors, mask[: self.trained].float()) > 0).to(mask)

    def mask_of(self, bits: torch.Tensor) -> torch.Tensor:
        """The mask that bits describe: [total] in their dtype, ones in running statistics."""
        if self.channels is None:
            return bits
        mask = self.channels.mask(self.parameters.tensors, bits.bool()).to(bits)
        return torch.cat([mask, mask.new_ones(self.total - self.trained)])

    def counts_by_sums(self, flags: torch.Tensor) -> torch.Tensor:
        """The counts of flags, bool [total], by one running sum over all tensors, on any device."""
        sums = torch.nn.functional.pad(flags.cumsum(0, dtype=torch.int32), (1, 0))
        return torch.stack([sums[end] for end in accumulate(self.sizes, initial=0)]).diff().long()


def finite(vector: torch.Tensor) -> torch.Tensor:
    """A bool scalar on the vector's device: true if the vector [n >= 1] holds neither NaN nor infinity.

    It takes one pass, and a tenth of the time of `torch.isfinite`.
    """
    return torch.stack(torch.aminmax(vector)).isfinite().all()


def all_finite(vector: torch.Tensor) -> bool:
    """True if a vector of any length holds neither NaN nor infinity."""
    return not len(vector) or bool(finite(vector))


def whole(vector: torch.Tensor, space: ParameterSpace) -> torch.Tensor:
    """A vector over the parameters [trained], extended by 0 for the running statistics [total]."""
    return torch.nn.functional.pad(vector, (0, space.total - space.trained)) if space.statistics else vector


def keep_personal(network: torch.nn.Module, names: Collection[str]) -> None:
    """Make tensors of a network personal. Running statistics must be all personal, or nothing may be."""
    setattr(network, _PERSONAL, frozenset(names))


def cut_channels(network: torch.nn.Module, channels: Channels | None) -> None:
    """Make masks of a network cut out whole channels, or single weights again (None)."""
    setattr(network, _CHANNELS, channels)


def _personal_names(network: torch.nn.Module) -> frozenset[str]:
    return getattr(network, _PERSONAL, frozenset())


def flat_tensors(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A network's tensors by name, in their order in the flat vector.

    First come `named_parameters`, personal ones last; then the running means and variances.
    Raises `UserError` as `running_statistics` does.
    """
    local = _personal_names(network)
    parameters = sorted(network.named_parameters(), key=lambda named: named[0] in local)
    return {**dict(parameters), **running_statistics(network)}


def running_statistics(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The running means and variances of a network's BatchNorm layers, by name, in the order of `named_buffers`.

    Raises `UserError` for any other buffer, and for averages over all batches (`momentum=None`). Their counts would
    have to be stored too: values of one client would pass to the next one without updates and costs.
    """
    found = {}
    for path, layer in network.named_modules():
        for name, buffer in layer.named_buffers(path, recurse=False):
            kind = name.rpartition(".")[2]
            if not isinstance(layer, _BatchNorm):
                raise UserError(
                    f"The model keeps {name} beside its parameters, and its values would pass from client to "
                    "client uncounted: BatchNorm is the only layer with such buffers that can be trained."
                )
            if layer.momentum is None:
                raise UserError(
                    f"The model's layer {path} averages over all batches that it ever saw (momentum=None), which "
                    "clients cannot share: give it a momentum, such as 0.1."
                )
            if kind != "num_batches_tracked":
                found[name] = buffer
    return found


def bind(network: torch.nn.Module) -> tuple[torch.nn.Parameter, torch.Tensor]:
    """Make the network's tensors and gradients views of one flat vector.

    A write to the flat parameter or its `.grad` changes the network, and the other way round. Backward accumulates in
    place, so a step costs one kernel on the flat vector instead of one for each tensor.

    Returns the flat parameter [trained], and the vector [total] whose beginning it views; running statistics follow.
    BatchNorm's counts of batches are dropped, because nothing needs them.

    Raises `UserError` as `running_statistics` does.
    """
    space, tensors = ParameterSpace.of(network), list(flat_tensors(network).values())
    with torch.no_grad():
        vector = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        flat = torch.nn.Parameter(vector[: space.trained])
        flat.grad = torch.zeros_like(flat)
        views = [view for _, view in space.items(vector)]
        for tensor, view in zip(tensors, views, strict=True):
            tensor.data = view
        for parameter, (_, gradient) in zip(tensors, space.parameters.items(flat.grad), strict=False):
            parameter.grad = gradient
    for layer in network.modules():
        if isinstance(layer, _BatchNorm):
            layer.num_batches_tracked = None
    return flat, vector
