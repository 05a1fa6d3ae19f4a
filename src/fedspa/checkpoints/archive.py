"""A tree of plain values, arrays and masks as bytes: what a checkpoint is made of.

Everything is little-endian and lies close-packed:

| part | bytes | what |
|---|---|---|
| header | 28 | magic (8), version (4), bytes of the index (8), bytes of the data (8) |
| index | | JSON: `tree`, in which {"$": i} stands for the i-th object; `objects`, their kind, dtype and shape |
| data | | the objects' values, one after another |
| checksum | 32 | BLAKE2b of all that precedes |

A node of the tree is itself, a list of nodes, a dict of nodes, or one of these:

| node | what |
|---|---|
| {"$": i} | the i-th object |
| {"$items": [[key, node], ...]} | a dict whose keys are not all strings, or begin with $ |
| {"$states": [[client, node], ...]} | states of clients, of which what is nowhere else in the tree stays in the file |

Reading one executes nothing that it says. An object that occurs several times in the tree is stored once, and is
one object again when it is read: clients that share a mask go on sharing it.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
import torch

from fedspa.core.packed_mask import PackedMask
from fedspa.federated.client_states import StatesAtRest, Stored

Tree: TypeAlias = Any
"""None, bool, int, float, str, tensor, numpy array or PackedMask, in lists and in dicts with plain keys.

A `Stored` state may stand for the tensor or mask that it is; it is read only when it is written.
"""

MAGIC, VERSION = b"FSPA-ARC", 2
_HEADER = struct.Struct("<8sIQQ")
_CHECKSUM_BYTES = 32
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
_TAG, _ITEMS, _STATES = "$", "$items", "$states"
_PIECE = 1 << 22
"""Bytes of a file that are looked at together."""
_SENSELESS = (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError, RuntimeError)
_KINDS = {"tensor": torch.Tensor, "array": np.ndarray, "mask": PackedMask}


class ArchiveError(Exception):
    """Bytes that cannot be read as an archive, in a few words: truncated, damaged, or no archive at all."""


def pack(tree: Tree) -> bytes:
    """The bytes of a tree. Tuples become lists; `TypeError` for anything that `Tree` does not name."""
    file = io.BytesIO()
    write(tree, file)
    return file.getvalue()


def unpack(data: bytes) -> Tree:
    """The tree of `pack`, all tensors on the CPU. Raises `ArchiveError`."""
    return read(io.BytesIO(data))


def write(tree: Tree, file: BinaryIO) -> int:
    """Write a tree; returns the number of bytes. Beside the tree it takes the memory of its largest object."""
    objects: dict[int, tuple[int, Any]] = {}
    plain = _encode(tree, objects)
    entries = [_Entry.of(item) for _, item in objects.values()]
    index = json.dumps({"tree": plain, "objects": entries}, separators=(",", ":")).encode()
    data_bytes = sum(entry.bytes for entry in entries)
    digest = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)

    def put(part: bytes | memoryview) -> None:
        digest.update(part)
        file.write(part)

    put(_HEADER.pack(MAGIC, VERSION, len(index), data_bytes))
    put(index)
    for _, item in objects.values():
        put(_flat(item).numpy().data)
    file.write(digest.digest())
    return _HEADER.size + len(index) + data_bytes + _CHECKSUM_BYTES


def read(file: BinaryIO) -> Tree:
    """Read a tree from the start of a file. Raises `ArchiveError`.

    Nothing is allocated before the sizes that the file claims agree with each other and with its own, and no object
    before the checksum was found right. What `StatesAtRest` hold is not read but `Stored` in this file, which has
    to stay open for as long as it is asked for.
    """
    tree, entries, place = _verified(file)
    objects: list[Any] = [None] * len(entries)
    wanted = set(_referenced(tree))
    for number, entry in enumerate(entries):
        objects[number] = (
            entry.object(_take(file, entry.bytes)) if number in wanted else entry.stored(_Kept(file), place)
        )
        place += entry.bytes
        file.seek(place)
    return _decode(tree, objects)


def verify(file: BinaryIO) -> None:
    """Raises `ArchiveError` for whatever `read` would. Needs the memory of the index only."""
    _verified(file)


def _verified(file: BinaryIO) -> tuple[Any, list[_Entry], int]:
    """The tree as JSON has it, what is said of its objects, and where they begin, to which the file is set."""
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    digest = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)

    def take(count: int) -> bytes:
        part = _take(file, count).numpy().tobytes()
        digest.update(part)
        return part

    if length < _HEADER.size:
        raise ArchiveError(f"truncated: {length} bytes")
    magic, version, index_bytes, data_bytes = _HEADER.unpack(take(_HEADER.size))
    if magic != MAGIC:
        raise ArchiveError("no checkpoint of fedspa")
    if version != VERSION:
        raise ArchiveError(f"of format {version}, where this version of fedspa reads format {VERSION}")
    begin = _HEADER.size + index_bytes
    expected = begin + data_bytes + _CHECKSUM_BYTES
    if length != expected:
        raise ArchiveError(
            f"{'truncated' if length < expected else 'too long'}: {length} bytes of {expected}"
        )
    try:
        index = json.loads(take(index_bytes))
        tree, entries = index["tree"], [_Entry(*entry) for entry in index["objects"]]
        if any(entry.bytes < 0 for entry in entries) or sum(entry.bytes for entry in entries) != data_bytes:
            raise ArchiveError("damaged: its objects do not fill it")
        for entry in entries:
            entry.check()
        _decode(tree, [None] * len(entries))
    except _SENSELESS as error:
        raise ArchiveError("damaged: its index makes no sense") from error
    for done in range(0, data_bytes, _PIECE):
        digest.update(_take(file, min(_PIECE, data_bytes - done)).numpy().data)
    if file.read() != digest.digest():
        raise ArchiveError("damaged: wrong checksum")
    file.seek(begin)
    return tree, entries, begin


def _take(file: BinaryIO, count: int) -> torch.Tensor:
    """The next bytes, uint8 [count]."""
    part = torch.empty(count, dtype=torch.uint8)
    if file.readinto(part.numpy().data) != count:  # type: ignore[attr-defined]
        raise ArchiveError("truncated while it was read")
    return part


class _Kept:
    """The file of an archive, for what is read of it later."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, place: int, size: int) -> bytearray:
        data = bytearray(size)
        self._file.seek(place)
        if self._file.readinto(data) != size:  # type: ignore[attr-defined]
            raise ArchiveError("truncated while it was read")
        return data

    def free(self, place: int, size: int) -> None:
        """It stays as it is."""


def data_size(tree: Tree) -> int:
    """Bytes of the objects in a tree, each counted once: nearly all that `write` will write."""
    objects: dict[int, tuple[int, Any]] = {}
    _encode(tree, objects)
    return sum(_Entry.of(item).bytes for _, item in objects.values())


class _Entry(NamedTuple):
    """What the index says of an object."""

    kind: str
    dtype: str
    shape: list[int]
    """Of a mask: that of its bits."""
    length: int | None = None
    """Of a mask: how many parameters it covers."""

    @classmethod
    def of(cls, item: Any) -> _Entry:
        if isinstance(item, Stored):
            return cls("tensor" if item.mask_length is None else "mask", *_layout(item), item.mask_length)
        kind = next(kind for kind, known in _KINDS.items() if isinstance(item, known))
        values, length = (item.bits, item.length) if isinstance(item, PackedMask) else (item, None)
        return cls(kind, *_layout(values), length)

    @property
    def bytes(self) -> int:
        """Raises `KeyError`, `TypeError` or `ValueError` for what cannot be."""
        if any(size < 0 for size in self.shape):
            raise ValueError(self.shape)
        return _DTYPES[self.dtype].itemsize * math.prod(self.shape)

    def check(self) -> None:
        """Raises `TypeError` or `ValueError` where no object can be so."""
        if self.kind not in _KINDS or (self.kind == "array" and self.dtype == "bfloat16"):
            raise ValueError(self)
        is_mask = self.kind == "mask"
        if is_mask != (self.length is not None):
            raise ValueError(self)
        if is_mask and (self.dtype != "uint8" or self.shape != [math.ceil(self.length / 8)]):  # type: ignore[operator]
            raise ValueError(self)

    def object(self, data: torch.Tensor) -> Any:
        values = data.view(_DTYPES[self.dtype]).reshape(self.shape)
        if self.kind == "array":
            return values.numpy()
        return values if self.length is None else PackedMask(values, self.length)

    def stored(self, file: _Kept, place: int) -> Stored:
        shape, dtype = torch.Size(self.shape), _DTYPES[self.dtype]
        return Stored(file, place, self.bytes, shape, dtype, torch.device("cpu"), self.length)


def _layout(values: Any) -> tuple[str, list[int]]:
    return str(values.dtype).removeprefix("torch."), list(values.shape)


def _flat(item: Any) -> torch.Tensor:
    """The values of an object as they lie in an archive: uint8 on the CPU."""
    if isinstance(item, Stored):
        item = item.read()
    if isinstance(item, PackedMask):
        item = item.bits
    values = torch.from_numpy(np.ascontiguousarray(item)) if isinstance(item, np.ndarray) else item.detach()
    flat = values.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8)  # numpy's have stride 0


def _encode(node: Tree, objects: dict[int, tuple[int, Any]]) -> Any:
    """The tree as JSON has it. What objects it holds are noted by id: their number and they themselves."""
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list | tuple):
        return [_encode(item, objects) for item in node]
    if isinstance(node, StatesAtRest):
        return {_STATES: [[client, _encode(dict(state), objects)] for client, state in node.items()]}
    if isinstance(node, dict):
        if all(isinstance(key, str) and not key.startswith(_TAG) for key in node):
            return {key: _encode(value, objects) for key, value in node.items()}
        if not all(key is None or isinstance(key, bool | int | float | str) for key in node):
            raise TypeError("a checkpoint's keys must be plain values")
        return {_ITEMS: [[key, _encode(value, objects)] for key, value in node.items()]}
    if not isinstance(node, (*_KINDS.values(), Stored)):
        raise TypeError(f"{type(node).__name__} cannot be in a checkpoint")
    number, _ = objects.setdefault(id(node), (len(objects), node))
    return {_TAG: number}


def _decode(node: Any, objects: list[Any]) -> Tree:
    if isinstance(node, list):
        return [_decode(item, objects) for item in node]
    if not isinstance(node, dict):
        return node
    if _TAG in node:
        if node[_TAG] < 0:
            raise IndexError(node)
        return objects[node[_TAG]]
    if _ITEMS in node:
        return {key: _decode(value, objects) for key, value in node[_ITEMS]}
    if _STATES in node:
        return StatesAtRest({client: _decode(state, objects) for client, state in node[_STATES]})
    return {key: _decode(value, objects) for key, value in node.items()}


def _referenced(node: Any) -> Iterator[int]:
    """The numbers of the objects in a tree, but for states of clients."""
    if isinstance(node, dict):
        if _TAG in node:
            yield node[_TAG]
        elif _STATES not in node:
            node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from _referenced(item)
