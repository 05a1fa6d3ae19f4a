"""Uniform: the same sparsity in every tensor, biases and norms included (the paper's ablation)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from fedspa.layer_sparsity.base import LayerSparsity


@dataclass(kw_only=True)
class Uniform(LayerSparsity):
    """Every masked tensor gets the network's density."""

    def densities(self, shapes: Sequence[tuple[int, ...]], density: Fraction) -> list[Fraction]:
        return [density] * len(shapes)
