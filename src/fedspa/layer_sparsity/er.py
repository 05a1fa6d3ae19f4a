"""ER: densities in proportion to those of an Erdos-Renyi graph (Mocanu et al. 2018), without kernel sizes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from fedspa.layer_sparsity.erk import ErdosRenyiKernel


@dataclass(kw_only=True)
class ErdosRenyi(ErdosRenyiKernel):
    """ERK without the kernel: `raw` comes from the numbers of outputs and inputs alone."""

    def raw(self, shape: tuple[int, ...]) -> Fraction:
        """(outputs + inputs) / (outputs x inputs); 1 for tensors of fewer than two dimensions."""
        return Fraction(shape[0] + shape[1], shape[0] * shape[1]) if len(shape) >= 2 else Fraction(1)
