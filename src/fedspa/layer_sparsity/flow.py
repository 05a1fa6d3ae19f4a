"""Checks that a signal can flow through a network with so many active parameters in each tensor."""

from __future__ import annotations

import logging
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
    counts = rule.active_counts(shapes, _density(sparsity))
    blocked = _blocked(names, shapes, counts, by_tensor)
    if blocked is not None:
        raise UserError(_refusal(rule, names, shapes, sparsity, blocked, by_tensor))
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
    if (left := int(_density(sparsity) * sum(weights))) < len(weights):
        raise UserError(
            f"sparsity={sparsity} leaves {left} active weights for {len(weights)} layers, so that nothing can flow "
            "through the network: lower sparsity."
        )


def _density(sparsity: float) -> Fraction:
    return 1 - Fraction(str(sparsity))  # of the decimal text, so that 1 - 0.8 is 0.2


def _blocked(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], counts: Sequence[int], by_tensor: bool
) -> str | None:
    """The reason why nothing flows through a layer; None if every layer passes a signal on."""
    tensors = [(n, c) for n, s, c in zip(names, shapes, counts, strict=True) if _is_weight(n, s)]
    if by_tensor:
        return next((f"no active parameter in {name}" for name, count in tensors if not count), None)
    # With fewer active parameters than layers, at least one layer is empty.
    total = sum(counts)
    return f"{total} active parameters for {len(tensors)} layers" if total < len(tensors) else None


def _is_weight(name: str, shape: tuple[int, ...]) -> bool:
    """True if this tensor multiplies all that a layer passes on: a weight, or the scale of a norm."""
    return prod(shape) > 0 and (len(shape) >= 2 or (name.endswith("weight") and prod(shape) > 1))


def _refusal(
    rule: LayerSparsity,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    sparsity: float,
    blocked: str,
    by_tensor: bool,
) -> str:
    def works(step: int) -> bool:
        counts = rule.active_counts(shapes, 1 - Fraction(step, STEPS))
        return _blocked(names, shapes, counts, by_tensor) is None

    low, high = 0, STEPS  # works at low, and not at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    largest = f"{low / STEPS:.6f}".rstrip("0").rstrip(".")
    way_out = f"every run above sparsity={largest} fails so, and a network needs more weights to learn; lower sparsity"
    if rule.min_active == 0:
        way_out += (
            ", or layer_sparsity.min_active=1, which keeps at least one active parameter in each tensor"
        )
    return (
        f"sparsity={sparsity} with layer_sparsity={rule.name} leaves {blocked}, so that "
        f"nothing can flow through the network: {way_out}."
    )
