"""ERK: densities in proportion to those of an Erdos-Renyi kernel (Evci et al. 2020, "Rigging the lottery").

The paper's Algorithm 2 starts from these densities; its appendix prints the formula with errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from fedspa.layer_sparsity.base import LayerSparsity


@dataclass(kw_only=True)
class ErdosRenyiKernel(LayerSparsity):
    """The density of a tensor is eps x raw(shape), but at most 1.

    Tensors of one dimension have raw = 1, so at usual densities they are dense; the largest convolutions
    are the sparsest.
    """

    def raw(self, shape: tuple[int, ...]) -> Fraction:
        """The sum of the tensor's dimensions over their product; 1 for a scalar."""
        return Fraction(sum(shape), prod(shape)) if shape else Fraction(1)

    def densities(self, shapes: Sequence[tuple[int, ...]], density: Fraction) -> list[Fraction]:
        """Solve for the eps that uses up the budget. While eps makes a density exceed 1, make the tensors of highest
        density dense, subtract their full size from the budget, and solve again."""
        raws = [self.raw(shape) for shape in shapes]
        sizes = [prod(shape) for shape in shapes]
        budget = density * sum(sizes)
        result = [Fraction(1)] * len(shapes)
        sparse = set(range(len(shapes)))
        while sparse:
            eps = budget / sum(raws[i] * sizes[i] for i in sparse)
            highest = max(raws[i] for i in sparse)
            if eps * highest <= 1:
                break
            dense = {i for i in sparse if raws[i] == highest}
            budget -= sum(sizes[i] for i in dense)
            sparse -= dense
        for i in sparse:
            result[i] = eps * raws[i]
        return result
