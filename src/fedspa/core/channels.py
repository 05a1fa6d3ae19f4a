"""The channels of a network that a mask can cut out, and the coordinates of the flat vector that belong to each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""The shape of each tensor by name, in their order in a flat vector."""


@dataclass(frozen=True, eq=False)
class Channels:
    """Units of channels that are active or inactive together, such as the channels of one group of a GroupNorm.

    The units of a group are interchangeable: each has as many coordinates in every tensor as the others. So a mask with
    a fixed number of units in each group has a fixed number of active parameters in each tensor.
    """

    groups: tuple[int, ...]
    """The number of units in each group."""
    axes: Mapping[str, tuple[torch.Tensor, ...]]
    """By the name of a tensor: the unit of each index along its first axes, int64. The number `total` stands for an
    index that is always active. Tensors that are not here are always active."""

    @property
    def total(self) -> int:
        """The number of units."""
        return sum(self.groups)

    def split(self, vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The pieces of a vector [units], one view for each group."""
        return torch.split(vector, list(self.groups))

    def first(self, widths: Sequence[int]) -> torch.Tensor:
        """The units of lowest number in each group: bool [units]. `widths`: how many of each group."""
        pairs = zip(self.groups, widths, strict=True)
        return torch.cat([torch.arange(size) < width for size, width in pairs])

    def mask(self, shapes: Shapes, units: torch.Tensor) -> torch.Tensor:
        """The coordinates of active units and of no unit: bool [total].

        `units`: bool [units]. A coordinate in two units, such as a weight between two channels, needs both.
        """
        pieces = []
        for name, shape in shapes.items():
            piece = torch.ones(shape, dtype=torch.bool, device=units.device)
            for axis, flags in enumerate(self._flags(name, units)):
                piece &= flags.view(-1, *[1] * (len(shape) - axis - 1))
            pieces.append(piece.flatten())
        return torch.cat(pieces)

    def counts(self, shapes: Shapes, widths: Sequence[int]) -> list[int]:
        """The active parameters of each tensor under a mask of so many units in each group."""
        units, counts = self.first(widths), []
        for name, shape in shapes.items():
            cut = [int(flags.sum()) for flags in self._flags(name, units)]
            counts.append(prod([*cut, *shape[len(cut) :]]))
        return counts

    def sums(self, shapes: Shapes, vector: torch.Tensor) -> torch.Tensor:
        """The sum of a vector [total] over the coordinates of each unit: [units].

        Under a mask, a unit is active if its sum is not 0.
        """
        sums = vector.new_zeros(self.total + 1)
        pieces = vector.split([prod(shape) for shape in shapes.values()])
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True):
            piece = piece.view(shape)
            for axis, labels in enumerate(self.axes.get(name, ())):
                others = [other for other in range(piece.dim()) if other != axis]
                along = piece.sum(others) if others else piece
                if vector.device.type == "cpu":
                    sums.index_add_(0, labels, along)
                else:  # on CUDA index_add_ adds in another order each time
                    sums.index_put_((labels.to(vector.device),), along, accumulate=True)
        return sums[:-1]

    def _flags(self, name: str, units: torch.Tensor) -> Iterator[torch.Tensor]:
        """True for each active index of a tensor, along each of its axes here."""
        always = torch.cat([units, units.new_ones(1)])
        return (always[labels.to(units.device)] for labels in self.axes.get(name, ()))
