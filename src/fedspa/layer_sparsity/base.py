"""What every layer-sparsity rule is: densities by tensor, turned into whole numbers of active parameters."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, prod

from fedspa.errors import check_choice

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class LayerSparsity(ABC):
    """A rule that shares a density out among tensors. All arithmetic is exact: Fractions and ints."""

    name: str
    mask_scope: str = "all"
    """Which tensors are masked and make up the budget: all, or weights (tensors of two or more dimensions;
    the others stay dense and do not count)."""

    def __post_init__(self) -> None:
        check_choice("layer_sparsity.mask_scope", self.mask_scope, ("all", "weights"))

    def active_counts(
        self, shapes: Sequence[tuple[int, ...]], density: Fraction, names: Sequence[str] | None = None
    ) -> list[int]:
        """The number of active parameters of each tensor, for a density in [0, 1] of the masked ones.

        Take the density from the decimal that the user wrote (`1 - Fraction("0.8")`): in binary 1 - 0.8 is
        not 0.2. Counts are rounded down, so their sum never exceeds the budget and falls short of it by less
        than one a tensor. A tensor left without active parameters is allowed, and warned about by its name
        (`names`, else its index).
        """
        counts = [prod(shape) for shape in shapes]
        masked = [i for i, shape in enumerate(shapes) if self.mask_scope == "all" or len(shape) >= 2]
        for i, share in zip(masked, self.densities([shapes[i] for i in masked], density), strict=True):
            counts[i] = floor(share * counts[i])
            if counts[i] == 0:
                logger.warning(
                    "%s at density %g leaves no active parameter in tensor %s of shape %s.",
                    self.name, density, names[i] if names else i, tuple(shapes[i]),
                )  # fmt: skip
        return counts

    @abstractmethod
    def densities(self, shapes: Sequence[tuple[int, ...]], density: Fraction) -> list[Fraction]:
        """The density of each masked tensor, in [0, 1]; weighted by size, their mean is `density`."""
