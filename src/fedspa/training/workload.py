"""The facts of a run by which an engine is chosen and sized."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """What an engine may be chosen by."""

    largest: int
    """Training rows of the largest client."""
    steps: int
    """Steps of local training in the whole run, about."""
    gradients: bool = False
    """Whether clients will ask for gradients of a batch."""
    test_batch: int = 128
    """Examples that a model is shown at a time when it is tested."""
