"""Stores a tree of plain values, tensors and masks in one file: the content of a checkpoint.

The file is in the safetensors format, so that any program can read it:

| tensor | content |
|---|---|
| torch.float32[120, 48], ... | all tensors of one dtype and shape, a row each; for masks the packed bits |
| plain | uint8: JSON with the format's number and the tree |
| checksum | uint8 [32], the end of the file: BLAKE2b of all bytes before it |

In the JSON {"$": [name, row]} stands for a tensor, and {"$": [name, row, length]} for a mask. A tensor or mask that
occurs several times in the tree is stored once, and is one object again after reading.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from fedspa.core.client_state import ClientState
from fedspa.core.packed_mask import PackedMask
from fedspa.core.tensor_file import as_bytes, file_header
from fedspa.federated.client_states import InFile

Tree: TypeAlias = Any
"""None, bool, int, float, str, tensors and packed masks, in lists and mappings. Keys become texts, as in JSON."""

FORMAT = 3
_CHECKSUM_BYTES = 32


class ArchiveError(Exception):
    """Raised for a file that is no whole archive. The message is a few words."""


class _Stacks:
    """The tensors of a tree, by dtype and shape."""

    def __init__(self, tree: Tree) -> None:
        self._places: dict[int, dict[str, list[Any]]] = {}
        self.rows: dict[str, list[torch.Tensor | InFile]] = {}
        self.plain = json.dumps(
            {"format": FORMAT, "tree": self._encoded(tree)}, separators=(",", ":")
        ).encode()
        self.rows = dict(sorted(self.rows.items(), key=lambda stack: -stack[1][0].dtype.itemsize))

    def _encoded(self, node: Tree) -> Any:
        if isinstance(node, ClientState):
            node = node.stored
        if isinstance(node, Mapping):
            return {key: self._encoded(value) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [self._encoded(item) for item in node]
        if not isinstance(node, torch.Tensor | PackedMask | InFile):
            return node
        if id(node) not in self._places:
            values = node.bits if isinstance(node, PackedMask) else node
            length = None if isinstance(node, torch.Tensor) else node.length
            name = f"{values.dtype}{list(values.shape)}"
            stack = self.rows.setdefault(name, [])
            place = [name, len(stack)] if length is None else [name, len(stack), length]
            self._places[id(node)] = {"$": place}
            stack.append(values)
        return self._places[id(node)]

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The file without its checksum."""
        stacks = {name: (rows[0].dtype, [len(rows), *rows[0].shape]) for name, rows in self.rows.items()}
        texts = {"plain": (torch.uint8, [len(self.plain)]), "checksum": (torch.uint8, [_CHECKSUM_BYTES])}
        yield file_header(stacks | texts)
        for rows in self.rows.values():
            yield from (as_bytes(row.values() if isinstance(row, InFile) else row) for row in rows)
        yield self.plain


def write(tree: Tree, file: BinaryIO) -> None:
    """Write a tree. Raises `TypeError` for values that `Tree` does not allow."""
    digest = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    for piece in _Stacks(tree).pieces():
        digest.update(piece)
        file.write(piece)
    file.write(digest.digest())


def read(path: Path) -> Tree:
    """Read a tree. Raises `ArchiveError`.

    Its tensors are views of the file, on the CPU. Copy a tensor to keep it, so that only such tensors need memory.
    """
    verify(path)
    try:
        with safe_open(path, "pt") as file:
            stacks = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        content = json.loads(stacks["plain"].numpy().tobytes())
        if (found := content["format"]) == FORMAT:
            return _decoded(content["tree"], stacks, {})
    except (SafetensorError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise ArchiveError("not written by this version of fedspa") from error
    raise ArchiveError(f"of format {found}, where this version of fedspa reads format {FORMAT}")


def verify(path: Path) -> None:
    """Raise `ArchiveError` unless the file is whole."""
    with (
        path.open("rb") as file,
        suppress(ValueError),  # an empty file cannot be mapped
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as content,
    ):
        digest = hashlib.blake2b(content[:-_CHECKSUM_BYTES], digest_size=_CHECKSUM_BYTES).digest()
        if digest == content[-_CHECKSUM_BYTES:]:
            return
    raise ArchiveError("damaged, cut short, or no checkpoint of fedspa: its checksum is wrong")


def _decoded(node: Any, stacks: Mapping[str, torch.Tensor], known: dict[tuple[Any, ...], Any]) -> Tree:
    if isinstance(node, list):
        return [_decoded(item, stacks, known) for item in node]
    if not isinstance(node, dict):
        return node
    if "$" not in node:
        return {key: _decoded(value, stacks, known) for key, value in node.items()}
    place = (name, row, *length) = tuple(node["$"])
    if place not in known:
        known[place] = PackedMask(stacks[name][row], *length) if length else stacks[name][row]
    return known[place]
