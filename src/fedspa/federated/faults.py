"""The faults of a federation. Simulated faults are drawn from the run's seed.

A simulated fault depends on (seed, round, client) alone; lateness depends on the other participants too. Neither the
order of the client updates nor the number of workers can change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from fedspa.core.randomness import numpy_generator
from fedspa.core.settings import FaultSettings

MOST_FLIPPED = 16
"""The largest number of flipped bits in a damaged message."""


class Fault(StrEnum):
    """The reason why a client update is lost, refused or changed.

    The first four are simulated, in the order in which they would happen. If two are drawn, only the first happens.
    """

    DROPOUT = "dropout"
    """The client never answers."""
    LATE = "late"
    """The client's update comes after the deadline."""
    LOST = "lost"
    """The client's update never arrives."""
    CORRUPT = "corrupt"
    """Bits of the client's update flipped on the way, so that its checksum is wrong."""
    DIVERGED = "diverged"
    """The client's loss, weights, gradient or update are not finite."""
    NORM_BOUND = "norm_bound"
    """The client's update is longer than `faults.norm_bound`."""


@dataclass(frozen=True)
class FaultModel:
    """Draws the simulated faults of a run."""

    settings: FaultSettings
    seed: int
    samples: Callable[[int], int]
    """The samples that a client's update trains on, up to a common factor."""

    def draw(self, round: int, participants: Sequence[int]) -> dict[int, Fault]:
        """The fault of each participant of a round (from 0) that has one."""
        settings = self.settings
        faults = {
            client: Fault.DROPOUT
            for client in participants
            if self._happens(Fault.DROPOUT, settings.dropout, round, client)
        }
        answering = [client for client in participants if client not in faults]
        late = self._late(round, answering)
        for client in answering:
            if client in late:
                faults[client] = Fault.LATE
            elif self._happens(Fault.LOST, settings.loss, round, client):
                faults[client] = Fault.LOST
            elif self._happens(Fault.CORRUPT, settings.corruption, round, client):
                faults[client] = Fault.CORRUPT
        return faults

    def duration(self, round: int, client: int) -> float:
        """The duration of a client update, without a unit."""
        normal = numpy_generator(self.seed, "faults/duration", round, client).standard_normal()
        return self.samples(client) * math.exp(self.settings.straggler_spread * normal)

    def _late(self, round: int, clients: Sequence[int]) -> set[int]:
        if self.settings.deadline is None or not clients:
            return set()
        durations = {client: self.duration(round, client) for client in clients}
        deadline = self.settings.deadline * sum(durations.values()) / len(durations)
        return {client for client, duration in durations.items() if duration > deadline}

    def _happens(self, fault: Fault, chance: float, round: int, client: int) -> bool:
        return chance > 0 and numpy_generator(self.seed, f"faults/{fault}", round, client).random() < chance


def damage(message: bytes, source: np.random.Generator) -> bytes:
    """The message with 1 to `MOST_FLIPPED` of its bits flipped."""
    count = int(source.integers(1, MOST_FLIPPED + 1))
    flipped = source.choice(8 * len(message), size=count, replace=False)
    damaged = np.frombuffer(message, np.uint8).copy()
    np.bitwise_xor.at(damaged, flipped // 8, np.uint8(1) << (flipped % 8).astype(np.uint8))
    return damaged.tobytes()
