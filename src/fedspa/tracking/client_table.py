"""The clients of a finished run: a table of numbers, and the tensors that are kept of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedspa.core.client_state import MASK, NOTHING, ClientState
from fedspa.core.packed_mask import PackedMask
from fedspa.partition.clients import ClientRows, row_counts

if TYPE_CHECKING:
    from fedspa.federated.loop import FederatedLoop

LENGTH = ".length"
"""The end of the name of a mask's length."""


def client_table(
    loop: FederatedLoop, rows: ClientRows, scores: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """An array [clients] for each column: int64, and float64 with NaN where there is no value.

    `scores`: in percent by name (accuracy/global). First masks all have the same density: that of one client without an
    update is that of all of them.
    """
    updates, density = np.zeros(len(rows.train), dtype=np.int64), np.empty(len(rows.train))
    for client, count in loop.state.updates.items():
        updates[client] = count
    never = np.flatnonzero(updates == 0)
    if len(never):
        density[never] = loop.state.density(int(never[0]))
    for client in loop.state.updates:
        density[client] = loop.state.density(client)
    sizes = {"train_size": rows.train, "val_size": rows.val, "test_size": rows.test}
    counts = {name: row_counts(of_clients) for name, of_clients in sizes.items()}
    return {**counts, "client_updates": updates, "density": density, **scores}


class Lazy(Mapping[str, torch.Tensor]):
    """Tensors by name, each made when it is asked for: together they may be larger than the memory."""

    def __init__(self, names: Sequence[str], make: Callable[[str], torch.Tensor]) -> None:
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def last_masks(loop: FederatedLoop) -> Lazy:
    """The masks of the trained clients, uint8 bit-packed, by client."""
    states = loop.state.clients

    def bits(client: str) -> torch.Tensor:
        mask = states[int(client)].mask
        assert mask is not None
        return mask.bits

    masked = next(iter(states.values()), NOTHING).mask
    return Lazy([str(client) for client in sorted(states)] if masked else [], bits)


def last_local_models(loop: FederatedLoop) -> Lazy:
    """The packed local model of each trained client: `<client>.values`, and the bits of `<client>.mask`."""
    models: Mapping[int, ClientState] = loop.state.local_models or {}

    def tensor(key: str) -> torch.Tensor:
        client, name = key.split(".")
        item = models[int(client)][name]
        return item.bits if isinstance(item, PackedMask) else item

    return Lazy([f"{client}.{name}" for client in sorted(models) for name in ("values", "mask")], tensor)


def last_states(loop: FederatedLoop) -> Lazy:
    """The states of the trained clients beside their masks, by `<client>.<name>`.

    A mask among them is two: its bits, and in `<client>.<name>.length` how many coordinates it covers.
    """
    states = loop.state.clients

    def tensor(key: str) -> torch.Tensor:
        client, name = key.split(".", 1)
        found = states[int(client)].get(name)
        if found is None:
            mask = states[int(client)][name.removesuffix(LENGTH)]
            assert isinstance(mask, PackedMask)
            return torch.tensor(mask.length)
        return found.bits if isinstance(found, PackedMask) else found

    return Lazy(
        [
            f"{client}.{name}{ending}"
            for client in sorted(states)
            for name, item in states[client].items()
            if name != MASK
            for ending in (("", LENGTH) if isinstance(item, PackedMask) else ("",))
        ],
        tensor,
    )


def saved_items(items: Mapping[str, torch.Tensor]) -> ClientState:
    """One client's state from its part of `last_states`: by name, without the client's number."""
    return ClientState(
        {
            name: PackedMask(item, int(items[name + LENGTH])) if name + LENGTH in items else item
            for name, item in items.items()
            if not name.endswith(LENGTH)
        }
    )
