"""Draws the clients that take part in a round. The prediction of costs uses it too."""

from __future__ import annotations

from collections.abc import Sequence

from fedspa.core.randomness import numpy_generator


def sample_clients(seed: int, round: int, clients: int, count: int) -> list[int]:
    """S_t: `count` of `clients`, drawn uniformly without replacement, in ascending order.

    With many clients NumPy draws without a permutation of all of them, so the time does not grow with their number.
    """
    chosen = numpy_generator(seed, "participants", round).choice(clients, size=count, replace=False)
    return sorted(int(client) for client in chosen)


def sample_tested(seed: int, clients: int, count: int | None) -> Sequence[int]:
    """The clients whose global and personal models are tested, ascending; the same in every round.

    All of them if `count` is None or at least `clients`; else `count` of them, drawn uniformly.
    """
    if count is None or count >= clients:
        return range(clients)
    chosen = numpy_generator(seed, "tested").choice(clients, size=count, replace=False)
    return sorted(int(client) for client in chosen)
