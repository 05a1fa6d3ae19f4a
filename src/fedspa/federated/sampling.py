"""Which clients take part in a round. Apart from the loop, so that costs can be told without it."""

from __future__ import annotations

from collections.abc import Sequence

from fedspa.core.randomness import numpy_generator


def sample_clients(seed: int, round: int, clients: int, count: int) -> list[int]:
    """S_t: `count` of `clients`, uniformly without replacement, in ascending order.

    NumPy draws without a permutation of all clients where they are many: its time does not grow with them.
    """
    chosen = numpy_generator(seed, "participants", round).choice(clients, size=count, replace=False)
    return sorted(int(client) for client in chosen)


def sample_tested(seed: int, clients: int, count: int | None) -> Sequence[int]:
    """The clients whose global and personal models are tested, ascending: the same in every round.

    All of them where `count` is None, or at least as many; else so many, drawn uniformly.
    """
    if count is None or count >= clients:
        return range(clients)
    chosen = numpy_generator(seed, "tested").choice(clients, size=count, replace=False)
    return sorted(int(client) for client in chosen)
