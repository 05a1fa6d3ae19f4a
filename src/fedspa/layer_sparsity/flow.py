"""Checks that a signal can flow through a network with so many active parameters in each tensor."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from math import prod

from fedspa.core.errors import UserError
from fedspa.layer_sparsity.base import LayerSparsity

logger = logging.getLogger(__name__)

STEPS = 10**6
"""The resolution for the largest sparsity that leaves no layer empty: a millionth."""


def counts_with_flow(
    rule: LayerSparsity,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    sparsity: float,
    *,
    by_tensor: bool = True,
) -> list[int]:
    """The rule's active parameters of each tensor at a sparsity.

    `by_tensor`: True if masks have exactly these counts; else they have only the total, and a searcher divides it.

    Raises `UserError` if a layer would have no active weight, so that nothing can flow through it. One warning names
    all other tensors without active parameters, such as biases.
    """

    def blocked(density: Fraction) -> str:
        """The reason why nothing flows through a layer at a density; "" if every layer passes a signal on."""
        counts = rule.active_counts(shapes, density)
        layers = {n: count for n, s, count in zip(names, shapes, counts, strict=True) if _is_weight(n, s)}
        if by_tensor:
            return next((f"no active parameter in {name}" for name, count in layers.items() if not count), "")
        # With fewer active parameters than layers, at least one layer is empty.
        total = sum(counts)
        return f"{total} active parameters for {len(layers)} layers" if total < len(layers) else ""

    density = 1 - Fraction(str(sparsity))  # of the decimal text, so that 1 - 0.8 is 0.2
    if reason := blocked(density):
        steps = range(1, STEPS)
        largest = bisect_left(steps, True, key=lambda step: bool(blocked(1 - Fraction(step, STEPS)))) / STEPS
        way_out = ", or layer_sparsity.min_active=1, which keeps at least one active parameter in each tensor"
        raise UserError(
            f"sparsity={sparsity} with layer_sparsity={rule.name} leaves {reason}, so that nothing can flow through "
            f"the network: every run above sparsity={f'{largest:.6f}'.rstrip('0').rstrip('.')} fails so, and a network "
            f"needs more weights to learn; lower sparsity{way_out * (rule.min_active == 0)}."
        )
    counts = rule.active_counts(shapes, density)
    empty = [name for name, count in zip(names, counts, strict=True) if not count]
    if empty and by_tensor:
        logger.warning(
            "layer_sparsity=%s at sparsity=%s leaves %d of %d tensors without an active parameter: %s.",
            rule.name, sparsity, len(empty), len(names), ", ".join(empty),
        )  # fmt: skip
    return counts


def check_total(shapes: Sequence[tuple[int, ...]], sparsity: float) -> None:
    """Raise `UserError` if a sparsity leaves fewer active weights than layers."""
    weights = [prod(shape) for shape in shapes if len(shape) > 1]
    if (left := int((1 - Fraction(str(sparsity))) * sum(weights))) < len(weights):
        raise UserError(
            f"sparsity={sparsity} leaves {left} active weights for {len(weights)} layers, so that nothing can flow "
            "through the network: lower sparsity."
        )


def _is_weight(name: str, shape: tuple[int, ...]) -> bool:
    """True if this tensor multiplies all that a layer passes on: a weight, or the scale of a norm."""
    return prod(shape) > 0 and (len(shape) >= 2 or (name.endswith("weight") and prod(shape) > 1))
