"""The facts of a run that decide the choice and size of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """The facts of a run for the choice of an engine."""

    largest: int
    """The number of training rows of the largest client."""
    steps: int
    """The approximate number of local training steps in the whole run."""
    participants: int = 8
    """The number of clients trained in a round."""
    gradients: bool = False
    """True if clients will need gradients of a batch."""
    masked: bool = False
    """True if clients train under masks."""
    test_batches: tuple[int, ...] = (128,)
    """The numbers of examples in one batch of a test, ascending."""
