"""Where each tensor of a network lies in one flat vector.

The whole framework speaks of weights, gradients, updates and masks as flat vectors of one length; only
the network itself sees shaped tensors, and they are views. The parameters come first. Behind them lie the running
statistics of BatchNorm, where a network has it: they travel, are merged, tested and saved with the weights, but no step
trains them and no mask prunes them, so that masks are 1 and gradients 0 there.

Layers that every client keeps to itself (`keep_personal`) come last, parameters before statistics. What the server,
methods, masks and messages call a flat vector is then the shared part before them; only engines see the whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fedspa.core.errors import UserError

_PERSONAL = "_personal_tensors"
"""The attribute of a network that names the tensors which stay with each client."""


@dataclass(frozen=True)
class ParameterSpace:
    """Names and shapes of the tensors, in the order in which they lie in the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    statistics: int = 0
    """How many of them, the last ones, are running statistics."""
    kept: int = 0
    """How many of them, the last ones, stay with each client: all running statistics and parameters before them."""

    @classmethod
    def of(cls, network: torch.nn.Module) -> ParameterSpace:
        """The space of a network: `flat_tensors` in their order.

        Raises `UserError` for a network with other state (see `running_statistics`).
        """
        tensors, statistics, local = (
            flat_tensors(network),
            running_statistics(network),
            _personal_names(network),
        )
        shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
        kept = sum(name in local for name in tensors)
        return cls(tuple(tensors), shapes, len(statistics), kept)

    @property
    def shared(self) -> ParameterSpace:
        """The tensors that the server has too: the first coordinates."""
        if not self.kept:
            return self
        return ParameterSpace(self.names[: -self.kept], self.shapes[: -self.kept])

    @property
    def parameters(self) -> ParameterSpace:
        """The parameters alone: the first `trained` coordinates."""
        if not self.statistics:
            return self
        return ParameterSpace(self.names[: -self.statistics], self.shapes[: -self.statistics])

    @property
    def running(self) -> ParameterSpace:
        """The running statistics alone: the last coordinates."""
        first = len(self.names) - self.statistics
        return ParameterSpace(self.names[first:], self.shapes[first:])

    @cached_property
    def trained(self) -> int:
        """Number of parameters, which lie before the running statistics."""
        return sum(self.sizes[: len(self.sizes) - self.statistics])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Length of each tensor's piece."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def total(self) -> int:
        """Length of the flat vector."""
        return sum(self.sizes)

    def split(self, vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The flat pieces of a vector [total], one view a tensor."""
        return torch.split(vector, list(self.sizes))

    def items(self, vector: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and shaped view of each tensor in a vector [total]."""
        for name, shape, piece in zip(self.names, self.shapes, self.split(vector), strict=True):
            yield name, piece.view(shape)

    def count(self, mask: torch.Tensor) -> tuple[int, ...]:
        """Active parameters of each tensor under a mask [total] of zeros and ones."""
        if mask.device.type != "cpu":  # where each tensor's own count would cost launches
            return self.count_by_sums(mask)
        flags = mask.bool()  # torch counts these ten times as fast as floats
        counts = torch.stack([piece.count_nonzero() for piece in self.split(flags)])
        return tuple(counts.tolist())

    def count_by_sums(self, mask: torch.Tensor) -> tuple[int, ...]:
        """The same by one running sum over all tensors, on any device."""
        sums = torch.nn.functional.pad(mask.bool().cumsum(0), (1, 0))
        ends = torch.tensor([0, *accumulate(self.sizes)], device=mask.device)
        return tuple(sums[ends].diff().tolist())


def all_finite(vector: torch.Tensor) -> bool:
    """Whether a vector holds neither NaN nor infinity: one pass, a tenth of what `torch.isfinite` takes."""
    return not len(vector) or bool(torch.stack(torch.aminmax(vector)).isfinite().all())


def whole(vector: torch.Tensor, space: ParameterSpace) -> torch.Tensor:
    """A vector over the parameters [trained] as one over all tensors [total]: 0 for the running statistics."""
    return torch.nn.functional.pad(vector, (0, space.total - space.trained)) if space.statistics else vector


def keep_personal(network: torch.nn.Module, names: Collection[str]) -> None:
    """Have tensors of a network stay with each client: of its running statistics all, or none and then no parameter."""
    setattr(network, _PERSONAL, frozenset(names))


def _personal_names(network: torch.nn.Module) -> frozenset[str]:
    return getattr(network, _PERSONAL, frozenset())


def flat_tensors(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A network's tensors by name, in the order in which they lie in the flat vector.

    `named_parameters`, those of layers that stay with each client last; then the running means and variances.
    Raises `UserError` as `running_statistics` does.
    """
    local = _personal_names(network)
    parameters = sorted(network.named_parameters(), key=lambda named: named[0] in local)
    return {**dict(parameters), **running_statistics(network)}


def running_statistics(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The running means and variances of a network's BatchNorm layers, by name, in the order of `named_buffers`.

    Raises `UserError` for any other buffer, and for averages over all batches ever seen (`momentum=None`), whose counts
    would have to be kept too: what one client leaves there would reach the next one, past updates and costs.
    """
    found = {}
    for path, layer in network.named_modules():
        for name, buffer in layer.named_buffers(path, recurse=False):
            kind = name.rpartition(".")[2]
            if not isinstance(layer, _BatchNorm):
                raise UserError(
                    f"The model keeps {name} beside its parameters, which clients would hand to each other unseen: "
                    "of layers with such buffers only BatchNorm can be trained."
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
    """Lay the network's tensors and gradients out as views of one flat vector.

    Whoever writes into the flat parameter or its `.grad` writes into the network, and the other way round:
    backward accumulates in place, so a step costs one kernel on the flat vector instead of one a tensor.

    Returns the flat parameter [trained], and the vector [total] of which it is a view: behind it lie the running
    statistics. BatchNorm's counts of batches, which nothing needs, are dropped.

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
