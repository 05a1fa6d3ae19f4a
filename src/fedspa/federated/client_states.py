"""The states of the visited clients: in memory up to a bound, beyond it in a file."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias
from weakref import ref

import torch

from fedspa.core.client_state import MASK, ClientState, Item
from fedspa.core.packed_mask import PackedMask
from fedspa.core.saved import Saved


class ClientStates(MutableMapping[int, ClientState]):
    """Remembers states by client. What it holds is replaced, never written into.

    An item that several clients are given, such as a common first mask, is held once, in memory or in the file, and
    whoever shares it can be told by what `held` gives.
    """

    def __init__(self, memory: float = float("inf")) -> None:
        """`memory`: bytes of states that are kept in memory; later ones go to a file in the folder for temporary
        files (TMPDIR), which nobody else sees and which ends with the process."""
        self._file = _StateFile()
        self.memory = memory
        self._records: dict[int, Held] = {}
        self._sharers: dict[int, int] = {}
        """How many clients have an item that is in memory, by its id."""
        self._held = 0

    def copy(self) -> ClientStates:
        """An independent mapping; the states themselves are shared, those in the file too."""
        other = ClientStates(self.memory)
        other._file, other._held = self._file, self._held
        other._records, other._sharers = dict(self._records), dict(self._sharers)
        return other

    def at_rest(self) -> StatesAtRest:
        """All states as they are held, what is in the file unread: they stay what they are while this dict lives."""
        return StatesAtRest(self._records)

    def __getitem__(self, client: int) -> ClientState:
        return at_hand(self._records[client])

    def held(self, client: int) -> Held:
        """A client's state as it is held: what is in the file is unread."""
        return self._records[client]

    def __setitem__(self, client: int, state: ClientState) -> None:
        self._let_go(client)
        self._records[client] = {name: self._placed(item) for name, item in state.items()}

    def __delitem__(self, client: int) -> None:
        self._let_go(client)
        del self._records[client]

    def __contains__(self, client: object) -> bool:
        return client in self._records

    def __iter__(self) -> Iterator[int]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def in_file(self) -> int:
        """How many clients have something in the file."""
        return sum(
            any(isinstance(item, Stored) for item in record.values()) for record in self._records.values()
        )

    def _placed(self, item: Item) -> Item | Stored:
        """The item in the file, where it is there already; in memory, where there is room or it is there; else in the
        file."""
        if there := self._file.place_of(item):
            return there
        size = _tensor(item).nbytes
        known = self._sharers.get(id(item), 0)
        if not known and self._held + size > self.memory:
            return self._file.store(item)
        self._sharers[id(item)] = known + 1
        self._held += 0 if known else size
        return item

    def _let_go(self, client: int) -> None:
        """Count a client's present state no longer."""
        for item in self._records.get(client, {}).values():
            if isinstance(item, Stored):
                continue
            self._sharers[id(item)] -= 1
            if not self._sharers[id(item)]:
                del self._sharers[id(item)]
                self._held -= _tensor(item).nbytes


class StatesAtRest(dict[int, Mapping[str, "Item | Stored"]]):
    """States of which some items, or all, are not in memory: a checkpoint is written from one, and gives one."""


class StateFile(Protocol):
    """Where stored items lie."""

    def read(self, place: int, size: int) -> bytearray:
        """So many bytes from there on."""

    def free(self, place: int, size: int) -> None:
        """Nobody refers to them any more."""


class _StateFile:
    """A file of items, made when the first one comes; the place of one that nobody refers to any more is reused."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._stored: dict[int, tuple[ref[Item], ref[Stored]]] = {}
        """By the id of an item that still lives: where it lies."""

    def store(self, item: Item) -> Stored:
        there = self._written(item)
        self._stored[id(item)] = ref(item, partial(self._forget, id(item))), ref(there)
        return there

    def _forget(self, key: int, _: object) -> None:
        self._stored.pop(key, None)

    def place_of(self, item: Item) -> Stored | None:
        """Where this very item lies already."""
        known = self._stored.get(id(item))
        return known[1]() if known and known[0]() is item else None

    def _written(self, item: Item) -> Stored:
        tensor = _tensor(item)
        if self._number is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open for as long as this object is)
            self._number = self._file.fileno()
        free = self._free.get(tensor.nbytes)
        place = free.pop() if free else self._end
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        written = 0
        while written < len(data):
            written += os.pwrite(self._number, data[written:], place + written)
        self._end = max(self._end, place + len(data))
        length = item.length if isinstance(item, PackedMask) else None
        return Stored(self, place, tensor.nbytes, tensor.shape, tensor.dtype, tensor.device, length)

    def read(self, place: int, size: int) -> bytearray:
        assert self._number is not None
        data = bytearray(size)
        done = 0
        while done < size:
            done += os.preadv(self._number, [memoryview(data)[done:]], place + done)
        return data

    def free(self, place: int, size: int) -> None:
        self._free.setdefault(size, []).append(place)


@dataclass(frozen=True, eq=False)
class Stored:
    """Where an item lies in the file, and what it was."""

    file: StateFile
    place: int
    size: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    mask_length: int | None

    def read(self) -> Item:
        data = self.file.read(self.place, self.size)
        flat = torch.frombuffer(data, dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)
        values = flat.view(self.shape)
        return values.to(self.device) if self.mask_length is None else PackedMask(values, self.mask_length)

    def __del__(self) -> None:
        self.file.free(self.place, self.size)

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process travels what is in the file."""
        return _arrived, (self.read(),)


Held: TypeAlias = "Mapping[str, Item | Stored]"
"""A state, perhaps with items that are read from the file only when they are needed."""


def at_hand(state: Held) -> ClientState:
    """A state with all its items read."""
    if isinstance(state, ClientState):
        return state
    return ClientState(
        {name: item.read() if isinstance(item, Stored) else item for name, item in state.items()}
    )


def _arrived(item: Item) -> Item:
    return item


def _tensor(item: Item) -> torch.Tensor:
    return item.bits if isinstance(item, PackedMask) else item


def saved_states(saved: Saved, first: ClientState, like: torch.Tensor, memory: float) -> ClientStates:
    """The states of a checkpoint's `clients`, on the device of the weights `like` [total].

    Item by item, so that what is beyond `memory` (bytes) never is in memory all at once. Those which clients share
    with `first`, the state before a first visit, they go on sharing with this run's. Raises `Misfit`.
    """
    shared: dict[int, Item] = {}
    saved["first"].mapping(first)
    for name, item in first.items():
        theirs = saved["first"][name]
        _check(theirs, item, name, like)
        shared[id(theirs.value)] = item
    clients, states = saved["clients"], ClientStates(memory)
    holders = Counter(id(item) for record in clients.mapping().values() for item in _items(record))

    def placed(item: Saved, name: str) -> Item:
        key = id(item.value)
        if key in shared:
            return shared[key]
        held = Saved(item.value.read(), item.where) if isinstance(item.value, Stored) else item
        _check(held, first.get(name), name, like)
        here: Item = held.value.to(like.device) if isinstance(held.value, torch.Tensor) else held.value
        if holders[key] > 1:
            shared[key] = here
        return here

    for client, record in clients.items():
        if missing := set(first) - set(record.mapping()):
            raise record.misfit(f"a record with {min(missing)}")
        states[client.integer()] = ClientState(
            {name.text(): placed(item, name.text()) for name, item in record.items()}
        )
    return states


def _items(record: object) -> Iterable[object]:
    return record.values() if isinstance(record, Mapping) else ()


def _check(saved: Saved, first: Item | None, name: str, like: torch.Tensor) -> None:
    """Raise `Misfit` unless an item is as that of the first state; where that has none, unless it is an item."""
    if isinstance(first, torch.Tensor):
        saved.tensor(first.dtype, first.shape)
    elif first is not None or name == MASK:
        saved.mask(len(like) if first is None else first.length)
    elif isinstance(saved.value, PackedMask):
        saved.mask()
    else:
        saved.tensor()
