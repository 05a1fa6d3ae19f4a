"""Where each parameter tensor of a network lies in one flat vector.

The whole framework speaks of weights, gradients, updates and masks as flat vectors of one length; only
the network itself sees shaped tensors, and they are views.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from fedspa.errors import UserError


@dataclass(frozen=True)
class ParameterSpace:
    """Names and shapes of the parameter tensors, in the order in which they lie in the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, network: torch.nn.Module) -> ParameterSpace:
        """The space of a network's parameters, in `named_parameters` order."""
        named = list(network.named_parameters())
        return cls(tuple(name for name, _ in named), tuple(tuple(p.shape) for _, p in named))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of parameters of each tensor."""
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
        counts = torch.stack([piece.count_nonzero() for piece in self.split(mask)])
        return tuple(counts.tolist())

    def count_by_sums(self, mask: torch.Tensor) -> tuple[int, ...]:
        """The same by one running sum over all tensors, on any device."""
        sums = torch.nn.functional.pad(mask.bool().cumsum(0), (1, 0))
        ends = torch.tensor([0, *accumulate(self.sizes)], device=mask.device)
        return tuple(sums[ends].diff().tolist())


def all_finite(vector: torch.Tensor) -> bool:
    """Whether a vector holds neither NaN nor infinity: one pass, a tenth of what `torch.isfinite` takes."""
    return not len(vector) or bool(torch.stack(torch.aminmax(vector)).isfinite().all())


def bind(network: torch.nn.Module) -> torch.nn.Parameter:
    """Lay the network's parameters and gradients out as views of one flat parameter, and return it.

    Whoever writes into the flat parameter or its `.grad` writes into the network, and the other way round:
    backward accumulates in place, so a step costs one kernel on the flat vector instead of one a tensor.

    Raises `UserError` for a network with buffers, such as the running means of BatchNorm: what one client
    leaves in them would reach the next one, past masks, updates and costs.
    """
    if buffer := next((name for name, _ in network.named_buffers()), None):
        raise UserError(
            f"The model keeps {buffer} beside its parameters, which clients would hand to each other unseen: "
            "use layers without such buffers, as GroupNorm in place of BatchNorm."
        )
    space = ParameterSpace.of(network)
    with torch.no_grad():
        flat = torch.nn.Parameter(torch.cat([p.detach().reshape(-1) for p in network.parameters()]))
        flat.grad = torch.zeros_like(flat)
        views = zip(network.parameters(), space.items(flat.detach()), space.items(flat.grad), strict=True)
        for parameter, (_, weight), (_, gradient) in views:
            parameter.data = weight
            parameter.grad = gradient
    return flat
