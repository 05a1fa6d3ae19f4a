"""The states of the trained clients: in memory up to a bound, beyond it in a memory-mapped file."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import UserDict, defaultdict
from copy import copy
from typing import TypeAlias
from weakref import WeakValueDictionary, finalize

import torch

from fedspa.core.client_state import ClientState, Item, StoredItem
from fedspa.core.packed_mask import PackedMask
from fedspa.core.tensor_file import as_bytes

CHUNK = 1 << 26
"""The step in bytes by which the file grows. Only written parts need space on the disk."""
_ALIGNMENT = 64

Place: TypeAlias = "tuple[mmap.mmap, int, int]"
"""A map of a part of the file, the offset in the map, and the offset in the file."""


class ClientStates(UserDict[int, ClientState]):
    """Stores states by client. A state is replaced, never changed in place."""

    def __init__(self, memory: float = float("inf")) -> None:
        """`memory`: the bytes of states that stay in memory. Later ones go to a file in the folder for temporary
        files (TMPDIR), which only this process sees and which ends with it."""
        super().__init__()
        self.memory, self._shelf = memory, _Shelf(memory)

    def __setitem__(self, client: int, state: ClientState) -> None:
        self.data[client] = ClientState({name: self._shelf.keep(item) for name, item in state.stored.items()})

    def copy(self) -> ClientStates:
        """An independent mapping that shares the states themselves."""
        self._shelf.file.release_pages()
        return copy(self)

    @property
    def bytes_in_file(self) -> int:
        """Bytes of the items that lie in the file now."""
        return self._shelf.file.used


class InFile:
    """An item in the file. Its tensors are views of the file, and keep its place reserved."""

    # No tensor is stored for an item. Each tensor would leave a small block of the C library behind each large block
    # that is freed, and the large blocks could not be used again.
    __slots__ = ("__weakref__", "dtype", "length", "piece", "shape")

    def __init__(self, piece: memoryview, values: torch.Tensor, length: int | None) -> None:
        """`length`: the length of a mask; None for a tensor."""
        self.piece, self.dtype, self.shape, self.length = piece, values.dtype, tuple(values.shape), length

    def item(self) -> Item:
        values = torch.frombuffer(self.piece, dtype=self.dtype).view(self.shape)
        return values if self.length is None else PackedMask(values, self.length)


class _Shelf:
    """Stores items as long as something refers to them. An item that several clients share is stored once."""

    def __init__(self, memory: float) -> None:
        self._room, self.file = memory, _MappedFile()
        self._kept: WeakValueDictionary[int, Item | InFile] = WeakValueDictionary()
        """The item or its copy in the file, by the id of the item."""

    def keep(self, item: Item | StoredItem) -> Item | StoredItem:
        """The item itself if it fits into the memory, else its copy in the file."""
        if not isinstance(item, torch.Tensor | PackedMask):
            return item
        if (kept := self._kept.get(id(item))) is not None:
            return kept
        values, length = (item.bits, item.length) if isinstance(item, PackedMask) else (item, None)
        if values.nbytes <= self._room:
            self._room -= values.nbytes
            finalize(item, self._make_room, values.nbytes).atexit = False
            kept = item
        else:
            kept = InFile(self.file.copied(values), values, length)
            finalize(item, self._kept.pop, id(item), None).atexit = False
        self._kept[id(item)] = kept
        return kept

    def _make_room(self, size: int) -> None:
        self._room += size


class _MappedFile:
    """A temporary file of tensors. A tensor's place is free again once nothing refers to it."""

    def __init__(self) -> None:
        self.used = 0
        self._maps: list[mmap.mmap] = []
        self._free: defaultdict[int, list[Place]] = defaultdict(list)
        self._end = self._size = 0

    def copied(self, values: torch.Tensor) -> memoryview:
        """The part of the file with a copy of a tensor. Raises `OSError` if the disk is full."""
        data = as_bytes(values)
        map, at, start = place = (
            self._free[len(data)].pop() if self._free[len(data)] else self._new(len(data))
        )
        written = 0
        while written < len(data):  # not copied to the map: on a full disk that would end the process
            written += os.pwrite(self._file.fileno(), data[written:], start + written)
        piece = memoryview(map)[at : at + len(data)]
        finalize(piece, self._release, len(data), place).atexit = False
        self.used += len(data)
        return piece

    def release_pages(self) -> None:
        """Release the memory of pages that were read from the file."""
        for map in self._maps:
            map.madvise(mmap.MADV_DONTNEED)

    def _release(self, size: int, place: Place) -> None:
        self.used -= size
        self._free[size].append(place)

    def _new(self, size: int) -> Place:
        if not self._maps:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open for as long as this object is)
        if self._end + size > self._size:
            self._end, length = self._size, -(-size // CHUNK) * CHUNK
            self._size += length
            os.ftruncate(self._file.fileno(), self._size)
            self._maps.append(mmap.mmap(self._file.fileno(), length, offset=self._end))
        start = self._end
        self._end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return self._maps[-1], start - (self._size - len(self._maps[-1])), start
