"""What a finished run says of each client, and of very many clients together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from fedspa.core.client_state import MASK, NOTHING, ClientState, Item
from fedspa.core.packed_mask import PackedMask
from fedspa.core.records import ClientRow
from fedspa.federated.client_states import Stored
from fedspa.federated.loop import FederatedLoop
from fedspa.partition.clients import ClientRows, row_counts

LENGTH = ".length"
"""How the name of a mask's length ends."""


def client_rows(loop: FederatedLoop, rows: ClientRows, scores: Mapping[str, np.ndarray]) -> list[ClientRow]:
    """A row a client. `scores`: in percent by kind and metric (global_accuracy), float64 [clients], NaN where there
    is none."""

    def score(name: str, client: int) -> float | None:
        value = float(scores[name][client])
        return None if math.isnan(value) else value

    return [
        ClientRow(
            client=client,
            train_size=len(rows.train[client]),
            val_size=len(rows.val[client]),
            test_size=len(rows.test[client]),
            visits=loop.state.visits.get(client, 0),
            density=loop.state.density(client),
            scores={name: score(name, client) for name in scores},
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
        density[never] = loop.state.density(int(never[0]))
    for client in loop.state.visits:
        density[client] = loop.state.density(client)
    sizes = {"train_size": rows.train, "val_size": rows.val, "test_size": rows.test}
    return {
        **{name: row_counts(held) for name, held in sizes.items()},
        "visits": visits,
        "density": density,
        **scores,
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


class LastStates(Mapping[str, torch.Tensor]):
    """What the visited clients remember beside their masks, by `<client>.<name>`; each item is looked up when it is
    asked for. A mask among them is two: its bits, and in `<client>.<name>.length` how many coordinates it covers."""

    def __init__(self, loop: FederatedLoop) -> None:
        self._states = loop.state.clients
        self._names: dict[str, tuple[int, str]] = {}
        for client in sorted(self._states):
            for name, item in self._states.held(client).items():
                endings = ("", LENGTH) if covers(item) is not None else ("",)
                if name != MASK:
                    self._names |= {f"{client}.{name}{ending}": (client, name) for ending in endings}

    def __getitem__(self, key: str) -> torch.Tensor:
        client, name = self._names[key]
        held = self._states.held(client)[name]
        if (length := covers(held)) is not None and key == f"{client}.{name}{LENGTH}":
            return torch.tensor(length)
        item = held.read() if isinstance(held, Stored) else held
        return item.bits if isinstance(item, PackedMask) else item

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def covers(item: Item | Stored) -> int | None:
    """How many coordinates a mask covers; None for a tensor."""
    if isinstance(item, Stored):
        return item.mask_length
    return item.length if isinstance(item, PackedMask) else None


def saved_items(items: Mapping[str, torch.Tensor]) -> ClientState:
    """What one client remembers, from its part of `LastStates`: by name, without the client's number."""
    return ClientState(
        {
            name: PackedMask(item, int(items[name + LENGTH])) if name + LENGTH in items else item
            for name, item in items.items()
            if not name.endswith(LENGTH)
        }
    )
