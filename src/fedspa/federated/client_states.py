"""The states of the trained clients: in memory up to a bound, beyond it in a temporary file."""

from __future__ import annotations

import os
import tempfile
from collections import UserDict, defaultdict
from functools import cached_property
from math import prod
from typing import BinaryIO
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch

from fedspa.core.client_state import ClientState, Item, StoredItem
from fedspa.core.packed_mask import PackedMask
from fedspa.core.tensor_file import as_bytes


class ClientStates(UserDict[int, ClientState]):
    """Stores states by client. A state is replaced, never changed in place.

    A copy is an independent mapping that shares the states themselves.
    """

    def __init__(self, memory: float = float("inf")) -> None:
        """`memory`: the bytes of states that stay in memory. Later ones go to a file in the folder for temporary
        files (TMPDIR), which only this process sees and which ends with it."""
        super().__init__()
        self.memory, self._shelf = memory, _Shelf(memory)

    def __setitem__(self, client: int, state: ClientState) -> None:
        self.data[client] = ClientState({name: self._shelf.keep(item) for name, item in state.stored.items()})

    @property
    def bytes_in_file(self) -> int:
        """Bytes of the items that lie in the file now."""
        return self._shelf.file.used


class Room:
    """A number of bytes, which items take as long as something refers to them."""

    def __init__(self, size: float) -> None:
        self._free = size

    def takes(self, item: object, size: int) -> bool:
        """Take the bytes of an item if as many are free. Returns False if not."""
        if size > self._free:
            return False
        self._free -= size
        finalize(item, self._release, size).atexit = False
        return True

    def _release(self, size: int) -> None:
        self._free += size


class InFile:
    """An item in the file, which is read at each use. Its place is free again once nothing refers to this object."""

    __slots__ = ("__weakref__", "_file", "_start", "dtype", "length", "shape")

    def __init__(self, file: _TemporaryFile, values: torch.Tensor, length: int | None) -> None:
        """`length`: the length of a mask; None for a tensor."""
        self._file, self._start = file, file.write(values)
        self.dtype, self.shape, self.length = values.dtype, tuple(values.shape), length
        finalize(self, file.release, self._start, values.nbytes).atexit = False

    def values(self) -> torch.Tensor:
        """The tensor, or the bits of the mask."""
        data = self._file.read(self._start, self.dtype.itemsize * prod(self.shape))
        return data.view(self.dtype).view(self.shape)

    def item(self) -> Item:
        return self.values() if self.length is None else PackedMask(self.values(), self.length)


class _Shelf:
    """Stores items as long as something refers to them. An item that several clients share is stored once."""

    def __init__(self, memory: float) -> None:
        self._room, self.file = Room(memory), _TemporaryFile()
        self._kept: WeakValueDictionary[int, Item | InFile] = WeakValueDictionary()
        """The item or its copy in the file, by the id of the item."""

    def keep(self, item: Item | StoredItem) -> Item | StoredItem:
        """The item itself if it fits into the memory, else its copy in the file."""
        if not isinstance(item, torch.Tensor | PackedMask):
            return item
        if (kept := self._kept.get(id(item))) is not None:
            return kept
        values, length = (item.bits, item.length) if isinstance(item, PackedMask) else (item, None)
        if self._room.takes(item, values.nbytes):
            kept = item
        else:
            kept = InFile(self.file, values, length)
            finalize(item, self._kept.pop, id(item), None).atexit = False
        self._kept[id(item)] = kept
        return kept


class _TemporaryFile:
    """Places for the bytes of tensors. A free place is used again for a tensor of the same size."""

    def __init__(self) -> None:
        self.used = self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    @cached_property
    def _file(self) -> BinaryIO:
        return tempfile.TemporaryFile(buffering=0)

    def write(self, values: torch.Tensor) -> int:
        """Write a tensor. Returns its place. Raises `OSError` if the disk is full."""
        data = as_bytes(values)
        if not self._free[len(data)]:
            self._free[len(data)].append(self._end)
            self._end += len(data)
        start, written = self._free[len(data)].pop(), 0
        while written < len(data):
            written += os.pwrite(self._file.fileno(), data[written:], start + written)
        self.used += len(data)
        return start

    def read(self, start: int, size: int) -> torch.Tensor:
        """The bytes at a place: uint8 [size]."""
        # Worker processes share the file's position, so it is not used.
        return torch.from_numpy(np.frombuffer(os.pread(self._file.fileno(), size, start), np.uint8).copy())

    def release(self, start: int, size: int) -> None:
        """Make a place free for another tensor."""
        self.used -= size
        self._free[size].append(start)
