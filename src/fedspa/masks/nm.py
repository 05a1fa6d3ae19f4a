"""N:M sparsity (Mishra et al., 2021): of every M weights along a layer's inputs N are active.

Hardware that knows the pattern can use it. At its first update a client keeps the N largest of the dense global weights
in each group. Later it exchanges one weight in a share of each tensor's groups, those whose smallest active weight is
smallest: that weight is dropped, and the one of largest gradient grows in its group, from the server's dense value. The
share falls along a cosine to 0, as in RigL.

Tensors whose number of inputs M does not divide stay dense, biases and norms too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedspa.core.errors import UserError, check_range
from fedspa.core.limits import limited
from fedspa.masks.dynamic import Annealed
from fedspa.masks.search_input import SearchInput
from fedspa.masks.select import drop_and_grow, largest, smallest, whole

if TYPE_CHECKING:
    from fedspa.core.weights import ParameterSpace

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class NM(Annealed):
    """Drops and grows inside groups."""

    n: int = 2
    m: int = limited(4, low=2)

    label: ClassVar[str] = "N:M"
    initial: ClassVar[str] = "same"  # type: ignore[misc]  # no mask is drawn: not a setting

    needs_gradient = True
    searches_first = True
    needs_first_gradient = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("mask.n", self.n, low=1, high=self.m - 1)

    def check_sparsity(self, rule: str, sparsity: float) -> None:
        needed = 1 - self.n / self.m
        if rule != "uniform" or abs(sparsity - needed) > 1e-4:
            raise UserError(
                f"mask={self.name} keeps {self.n} of every {self.m} weights, which sparsity={sparsity:g} with "
                f"layer_sparsity={rule} contradicts: use layer_sparsity=uniform sparsity={needed:.4g}."
            )

    def fit(self, space: ParameterSpace, target: Sequence[int], horizon: int) -> None:
        counts = [
            size * self.n // self.m if self._is_grouped(shape) else size
            for size, shape in zip(space.sizes, space.shapes, strict=True)
        ]
        super().fit(space, counts, horizon)
        dense = [
            name for name, shape in zip(space.names, space.shapes, strict=True) if not self._is_grouped(shape)
        ]
        logger.info("mask=%s leaves these tensors dense: %s.", self.name, ", ".join(dense) or "none")

    def _is_grouped(self, shape: tuple[int, ...]) -> bool:
        return len(shape) > 1 and shape[1] % self.m == 0

    def first_mask(self, search: SearchInput) -> torch.Tensor:
        pieces, vectors = [], map(search.space.split, (search.mask, search.weights))
        for shape, mask, weights in zip(search.space.shapes, *vectors, strict=True):
            if self._is_grouped(shape):
                mask = _flat(largest(self._groups(weights.abs(), shape), self.n), shape).to(mask)
            pieces.append(mask)
        return torch.cat(pieces)

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        if not self.searching(search.round):
            return search.mask
        assert search.gradient is not None
        fraction, pieces = self.drop_fraction(search.round), []
        vectors = map(search.space.split, (search.mask, search.weights.abs(), search.gradient.abs()))
        for shape, mask, *scores in zip(search.space.shapes, *vectors, strict=True):
            if self._is_grouped(shape):
                groups, weights, gradient = (self._groups(vector, shape) for vector in (mask, *scores))
                weakest = weights.masked_fill(groups == 0, torch.inf).amin(1)
                chosen = smallest(weakest, whole(fraction * len(groups)))
                exchanged = drop_and_grow(groups, weights, gradient, 1)
                mask = _flat(torch.where(chosen[:, None], exchanged, groups), shape)
            pieces.append(mask)
        return torch.cat(pieces)

    def _groups(self, piece: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor's piece as groups [groups, M] of neighbours along its inputs."""
        return piece.view(shape).movedim(1, -1).reshape(-1, self.m)


def _flat(groups: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Groups [groups, M] as the flat piece of a tensor of this shape."""
    outputs, inputs, *kernel = shape
    return groups.view(outputs, *kernel, inputs).movedim(-1, 1).reshape(-1)
