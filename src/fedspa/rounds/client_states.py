"""The states of the visited clients: in memory up to a bound, beyond it in a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

import torch

from fedspa.masks.packed import PackedMask
from fedspa.methods.base import ClientState


class ClientStates(MutableMapping[int, ClientState]):
    """Remembers states by client. What it holds is replaced, never written into.

    A state that several clients share, such as a common first mask, is held once, and always in memory.
    """

    def __init__(self, memory: float = float("inf")) -> None:
        """`memory`: bytes of states that are kept in memory; later ones go to a file in the folder for temporary
        files (TMPDIR), which nobody else sees and which ends with the process."""
        self._file = _StateFile()
        self._memory = memory
        self._items: dict[int, ClientState | Stored] = {}
        self._sharers: dict[int, int] = {}
        """How many clients have a state that is in memory, by its id."""
        self._held = 0

    def copy(self) -> ClientStates:
        """An independent mapping; the states themselves are shared, those in the file too."""
        other = ClientStates(self._memory)
        other._file, other._held = self._file, self._held
        other._items, other._sharers = dict(self._items), dict(self._sharers)
        return other

    def at_rest(self) -> dict[int, ClientState | Stored]:
        """All states as they are held, those in the file unread: they stay what they are while this dict lives."""
        return dict(self._items)

    def __getitem__(self, client: int) -> ClientState:
        item = self._items[client]
        return item.read() if isinstance(item, Stored) else item

    def __setitem__(self, client: int, state: ClientState) -> None:
        self._let_go(client)
        tensor = _tensor(state)
        if tensor is None:
            self._items[client] = state
        elif id(state) in self._sharers or self._held + tensor.nbytes <= self._memory:
            self._items[client] = state
            if id(state) not in self._sharers:
                self._held += tensor.nbytes
            self._sharers[id(state)] = self._sharers.get(id(state), 0) + 1
        else:
            self._items[client] = self._file.store(state)

    def __delitem__(self, client: int) -> None:
        self._let_go(client)
        del self._items[client]

    def __contains__(self, client: object) -> bool:
        return client in self._items

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def in_file(self) -> int:
        """How many states lie in the file."""
        return sum(isinstance(item, Stored) for item in self._items.values())

    def _let_go(self, client: int) -> None:
        """Count a client's present state no longer."""
        state = self._items.get(client)
        tensor = None if isinstance(state, Stored) else _tensor(state)
        if tensor is not None:
            self._sharers[id(state)] -= 1
            if not self._sharers[id(state)]:
                del self._sharers[id(state)]
                self._held -= tensor.nbytes


class _StateFile:
    """A file of states, made when the first one comes; the place of one that nobody refers to any more is reused."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def store(self, state: ClientState) -> Stored:
        tensor = _tensor(state)
        assert tensor is not None
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
        length = state.length if isinstance(state, PackedMask) else None
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
    """Where a state lies in the file, and what it was."""

    file: _StateFile
    place: int
    size: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    mask_length: int | None

    def read(self) -> ClientState:
        values = torch.frombuffer(self.file.read(self.place, self.size), dtype=self.dtype).view(self.shape)
        return values.to(self.device) if self.mask_length is None else PackedMask(values, self.mask_length)

    def __del__(self) -> None:
        self.file.free(self.place, self.size)


def _tensor(state: ClientState) -> torch.Tensor | None:
    return state.bits if isinstance(state, PackedMask) else state
