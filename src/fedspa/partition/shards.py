"""Pathological clients: each has rows of a few classes only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedspa.core.errors import UserError
from fedspa.core.limits import limited
from fedspa.partition.base import Partition, deal_classes


@dataclass(kw_only=True)
class Shards(Partition):
    """Every client has rows of `classes_per_client` classes. A class is divided evenly among its clients.

    McMahan et al. (2017) cut the rows, sorted by label, into equal shards and give each client some of them,
    which may contain further classes at a shard's border. Here the number of classes is exact, and client
    sizes differ a little instead.
    """

    classes_per_client: int = limited(2, low=1)

    def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        values, sizes = np.unique(labels, return_counts=True)
        fewest = -(-len(values) // clients)  # so that every class has a client
        if not fewest <= self.classes_per_client <= len(values):
            raise UserError(
                f"partition.classes_per_client={self.classes_per_client} cannot deal {len(values)} classes "
                f"to federation.clients={clients}: it must be in [{fewest}, {len(values)}]."
            )
        members: list[list[int]] = [[] for _ in values]
        for client in range(clients):
            # The classes with the fewest clients so far, in random order among equals.
            order = np.lexsort((rng.random(len(values)), np.array([len(chosen) for chosen in members])))
            for column in order[: self.classes_per_client]:
                members[column].append(client)
        counts = np.zeros((clients, len(values)), dtype=np.int64)
        for column, (size, chosen) in enumerate(zip(sizes, members, strict=True)):
            counts[chosen, column] = [len(part) for part in np.array_split(np.arange(size), len(chosen))]
        return deal_classes(labels, values, counts, rng)
