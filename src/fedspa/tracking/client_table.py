"""What a finished run says of each client, and of very many clients together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from fedspa.client_state import NOTHING
from fedspa.data.clients import ClientRows, row_counts
from fedspa.records import ClientRow
from fedspa.rounds.federation import FederatedLoop


def client_rows(loop: FederatedLoop, rows: ClientRows, scores: Mapping[str, np.ndarray]) -> list[ClientRow]:
    """A row a client. `scores`: accuracy in percent by kind, float64 [clients], NaN where there is none."""

    def score(kind: str, client: int) -> float | None:
        value = float(scores[kind][client])
        return None if math.isnan(value) else value

    return [
        ClientRow(
            client=client,
            train_size=len(rows.train[client]),
            val_size=len(rows.val[client]),
            test_size=len(rows.test[client]),
            visits=loop.state.visits.get(client, 0),
            density=loop.density(client),
            scores={kind: score(kind, client) for kind in scores},
        )
        for client in range(len(rows.train))
    ]


def client_arrays(
    loop: FederatedLoop, rows: ClientRows, scores: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The same as an array [clients] a column: int64, and float64 with NaN where there is no value.

    First masks all have the same density, so that of one client who was never visited is that of all of them.
    """
    clients = range(len(rows.train))
    visits = np.zeros(len(clients), dtype=np.int64)
    for client, count in loop.state.visits.items():
        visits[client] = count
    density = np.empty(len(clients))
    never = np.flatnonzero(visits == 0)
    if len(never):
        density[never] = loop.density(int(never[0]))
    for client in loop.state.visits:
        density[client] = loop.density(client)
    sizes = {"train_size": rows.train, "val_size": rows.val, "test_size": rows.test}
    return {
        **{name: row_counts(held) for name, held in sizes.items()},
        "visits": visits,
        "density": density,
        **{f"{kind}_accuracy": values for kind, values in scores.items()},
    }


class LastMasks(Mapping[str, torch.Tensor]):
    """The masks of the visited clients, uint8 bit-packed, by client; each is looked up when it is asked for."""

    def __init__(self, loop: FederatedLoop) -> None:
        self._states = loop.state.clients
        first = next(iter(self._states.values()), NOTHING)
        self._clients = sorted(self._states) if first.mask else []

    def __getitem__(self, client: str) -> torch.Tensor:
        mask = self._states[int(client)].mask
        assert mask is not None
        return mask.bits

    def __iter__(self) -> Iterator[str]:
        return map(str, self._clients)

    def __len__(self) -> int:
        return len(self._clients)
