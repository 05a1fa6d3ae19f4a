"""Which clients take part in a round. Apart from the loop, so that costs can be told without it."""

from __future__ import annotations

from fedspa.randomness import numpy_generator


def sample_clients(seed: int, round: int, clients: int, count: int) -> list[int]:
    """S_t: `count` of `clients`, uniformly without replacement, in ascending order."""
    chosen = numpy_generator(seed, "participants", round).choice(clients, size=count, replace=False)
    return sorted(int(client) for client in chosen)
