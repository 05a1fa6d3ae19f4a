"""The base class of layer-sparsity rules: densities by tensor, turned into whole numbers of active parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, prod
from typing import ClassVar

from fedspa.core.limits import Component, limited


@dataclass(kw_only=True)
class LayerSparsity(Component, ABC):
    """A rule that divides a density among tensors. All arithmetic is exact, in Fractions and ints."""

    section: ClassVar[str] = "layer_sparsity"
    mask_scope: str = limited("all", choices=("all", "weights"))
    """The tensors that are masked and make up the budget: all, or weights (tensors of two or more dimensions;
    the others stay dense and do not count)."""
    min_active: int = limited(0, low=0)
    """The least number of active parameters of each masked tensor. A smaller tensor keeps all of its parameters."""

    def active_counts(self, shapes: Sequence[tuple[int, ...]], density: Fraction) -> list[int]:
        """The number of active parameters of each tensor, for a density in [0, 1] of the masked ones.

        Take the density from the user's decimal text (`1 - Fraction("0.8")`), because in binary 1 - 0.8 is
        not 0.2. Counts are rounded down, so their sum never exceeds the budget, and is less than one a tensor
        below it.

        A tensor with a count below `min_active` gets `min_active`, and the rule divides the rest of the budget
        among the other tensors. The sum exceeds the budget only if the budget is smaller than the sum of all these
        minima. Then each tensor gets its minimum.
        """
        counts = [prod(shape) for shape in shapes]
        masked = [i for i, shape in enumerate(shapes) if self.mask_scope == "all" or len(shape) >= 2]
        budget = density * sum(counts[i] for i in masked)
        while masked:
            shares = self.densities([shapes[i] for i in masked], density)
            rounded = {i: floor(share * counts[i]) for i, share in zip(masked, shares, strict=True)}
            minima = {i: min(self.min_active, counts[i]) for i in masked}
            low = [i for i in masked if rounded[i] < minima[i]]
            if not low:
                for i in masked:
                    counts[i] = rounded[i]
                break
            for i in low:
                counts[i] = minima[i]
                budget -= minima[i]
            masked = [i for i in masked if i not in low]
            density = max(budget, Fraction(0)) / max(sum(counts[i] for i in masked), 1)
        return counts

    @abstractmethod
    def densities(self, shapes: Sequence[tuple[int, ...]], density: Fraction) -> list[Fraction]:
        """The density of each masked tensor, in [0, 1]. Their mean, weighted by size, is `density`."""
