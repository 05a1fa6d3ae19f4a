"""Hydra's `range(start,stop,step)`, counted in the decimals that were written.

Hydra adds up binary fractions: range(0.1,0.5,0.1) gives it 0.30000000000000004, and range(0.3,0.6,0.1) ends with 0.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from math import ceil, isfinite

from hydra.core.override_parser.types import RangeSweep


@dataclass(frozen=True)
class Range:
    """Equally spaced numbers; like Python's `range` it ends before its stop."""

    first: Decimal
    step: Decimal
    count: int
    """At least 1."""
    whole: bool
    """Its values are integers."""

    @classmethod
    def of(cls, given: RangeSweep) -> Range:
        """Raises ValueError for a range without values, or without an end."""
        parts = (given.start or 0, given.stop or 0, given.step)
        if not all(map(isfinite, parts)):
            raise ValueError("it has no end")
        # A float keeps every decimal of 15 digits; what it has beyond is none of what was written.
        first, stop, step = (Decimal(part if isinstance(part, int) else f"{part:.15g}") for part in parts)
        if not step:
            raise ValueError("its step is 0")
        count = ceil((stop - first) / step)
        if count < 1:
            raise ValueError("it has no values")
        return cls(first, step, count, all(isinstance(part, int) for part in parts))

    @property
    def values(self) -> list[int] | list[float]:
        """In its order."""
        exact = [self.first + number * self.step for number in range(self.count)]
        return [int(value) for value in exact] if self.whole else [float(value) for value in exact]

    @property
    def bounds(self) -> tuple[Decimal, Decimal]:
        """The lowest and the highest value."""
        last = self.first + (self.count - 1) * self.step
        return min(self.first, last), max(self.first, last)
