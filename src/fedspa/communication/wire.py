"""The wire format: how weights and updates travel between the server and a client, byte by byte.

A message contains values under a mask that both sides know, and the facts that the receiver does not know: the
seed of a random mask, and the bits of the client's next mask in those tensors where it changed. Everything
is little-endian and close-packed:

| part | bytes | content |
|---|---|---|
| header | 40 | magic, version, kind of message, type of the values, mask of the values (1 byte each but |
|        |    | the magic's 4); round, client (4 each); number of parameters, number of values (8 each); digest |
|        |    | of the network and of the masks that the receiver must have (8) |
| seed | 8 or none | if the mask has to be drawn at random |
| changes | 2 bits a tensor | of the next mask: 0 as before, 1 all inactive, 2 all active, 3 spelled out |
| mask bits | 1 bit a parameter | of the tensors spelled out, the first parameter in the highest bit |
|        |    | (masks that cut out channels: groups of channels instead of tensors, a bit for each of their units) |
| values | 4 or 2 each | fp32, fp16 or bf16, in the order of the flat vector; BatchNorm's running statistics, which |
|        |    | are the last and always there, in fp32: rounded, a variance may come out negative |
| checksum | 8 | BLAKE2b of all that precedes |
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from fedspa.core.packed_mask import PackedMask
from fedspa.core.records import SEED_BYTES, Costs
from fedspa.core.tensor_file import as_bytes
from fedspa.core.weights import ParameterSpace
from fedspa.costs.network import VALUE_BYTES

MAGIC, VERSION = b"FSPA", 3
KINDS = ("model", "update")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_CODES = tuple(DTYPES)
_UNDER = _KNOWN, _SEEDED, _NEXT = 0, 1, 2
"""The mask that the values lie under: the receiver's, one drawn from the seed, or the next mask."""
_SAME, _EMPTY, _FULL, _BITS = range(4)
"""The next mask of a tensor."""
_HEADER = struct.Struct("<4s4B2I2Q8s")
CHECKSUM_BYTES = 8


class WireError(Exception):
    """A message that cannot be read. The text says if it is damaged, for another receiver, or no message of fedspa."""


@dataclass(frozen=True)
class Envelope:
    """The address of a message: its kind, round and client. The receiver refuses a message with another address."""

    kind: str
    """model (the server's weights, to a client) or update (to the server)."""
    round: int
    client: int

    def __str__(self) -> str:
        return f"the {self.kind} of client {self.client} in round {self.round}"


@dataclass(frozen=True, eq=False)
class Message:
    """The content of one message."""

    envelope: Envelope
    vector: torch.Tensor
    """Floats [total]. Values travel where `mask` is one; after decoding the others are 0."""
    mask: PackedMask
    next_mask: PackedMask | None = None
    """The client's next mask; None if it does not change."""
    seed: int | None = None
    """Set if the receiver does not have `mask`: it draws the mask from this seed (and round and client)."""


def encode(message: Message, space: ParameterSpace, known: PackedMask, dtype: str = "fp32") -> bytes:
    """The bytes of a message.

    Args:
        known: the client's mask so far, which both sides have (all ones for a dense model).
        dtype: the type of the values on the wire, a key of `DTYPES`. Values are rounded as torch casts them;
            running statistics are not rounded.

    Raises `ValueError` for a mask that is not 1 in running statistics, or that the receiver cannot get.
    """
    changes, bits = _changes(space, known, message.next_mask or known)
    flags = message.mask.flags
    if not flags[space.trained :].all():
        raise ValueError("running statistics are sent whole: masks must be 1 there")
    values = message.vector.cpu()[flags]
    rounded, exact = values.tensor_split([len(values) - (space.total - space.trained)])
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        KINDS.index(message.envelope.kind),
        _CODES.index(dtype),
        _under(message, known),
        message.envelope.round,
        message.envelope.client,
        space.total,
        len(values),
        _context(space, known, message.mask),
    )
    seed = b"" if message.seed is None else message.seed.to_bytes(SEED_BYTES, "little")
    sent = as_bytes(rounded.to(DTYPES[dtype])), as_bytes(exact.float())
    body = b"".join((header, seed, _pack_pairs(changes), np.packbits(bits).tobytes(), *sent))
    return body + checksum(body)


def decode(
    data: bytes,
    space: ParameterSpace,
    known: PackedMask,
    envelope: Envelope,
    draw: Callable[[int], PackedMask] | None = None,
) -> Message:
    """The message in `data`, with its vector in float32 on the CPU.

    Nothing is allocated before header, length and checksum agree with each other and with `space`.

    Args:
        known: the receiver's copy of the client's mask.
        envelope: the address of the expected message.
        draw: returns the random mask of a seed.

    Raises:
        WireError: for anything but the expected message.
    """
    header = _read_header(data, space, envelope)
    statistics = space.total - space.trained
    at = _HEADER.size
    seed = None
    if header.under == _SEEDED:
        seed = int.from_bytes(data[at : at + SEED_BYTES], "little")
        at += SEED_BYTES

    sizes = space.mask_sizes
    table_bytes = _table_bytes(len(sizes))
    if len(data) < at + table_bytes + CHECKSUM_BYTES:
        raise WireError(f"The message has {len(data)} bytes, too few for its own header.")
    changes = _unpack_pairs(data[at : at + table_bytes], len(sizes))
    at += table_bytes
    spelled = sum(size for size, change in zip(sizes, changes, strict=True) if change == _BITS)
    mask_end = at + (spelled + 7) // 8
    exact = mask_end + (header.values - statistics) * DTYPES[header.dtype].itemsize
    end = exact + statistics * VALUE_BYTES
    if len(data) != end + CHECKSUM_BYTES:
        raise WireError(
            f"The message has {len(data)} bytes, by its header it must have {end + CHECKSUM_BYTES}."
        )

    bits = np.unpackbits(np.frombuffer(data[at:mask_end], np.uint8), count=spelled)
    changed = any(change != _SAME for change in changes)
    next_mask = _next_mask(space, known, changes, bits) if changed else None
    drawn = draw(seed) if draw and seed is not None else None
    mask = {_KNOWN: known, _SEEDED: drawn, _NEXT: next_mask}[header.under]
    if mask is None:
        missing = "a next mask, which it does not hold" if header.under == _NEXT else f"a mask of seed {seed}"
        raise WireError(f"The message's values lie under {missing}: the receiver cannot get that mask.")
    flags = mask.flags
    if header.context != _context(space, known, mask) or header.values != int(flags.count_nonzero()):
        raise WireError(f"The message is {envelope}, but for another network or under another mask.")
    vector = torch.zeros(space.total)
    rounded = floats(data[mask_end:exact], DTYPES[header.dtype])
    vector[flags] = torch.cat([rounded, floats(data[exact:end], torch.float32)])
    return Message(envelope, vector, mask, next_mask, seed)


def update_bytes(
    costs: Costs, tensors: int, dtype: str = "fp32", statistics: int = 0, messages: int = 2
) -> int:
    """The bytes of an update's messages in closed form, from its costs under the honest convention.

    `statistics`: the number of values in running statistics, which are part of each of the `messages`.

    Exact if the next mask changed in every tensor that is neither full nor empty; else an upper bound.
    """
    if not costs.traffic_bytes:
        return 0
    frame = _HEADER.size + _table_bytes(tensors) + CHECKSUM_BYTES
    exact = messages * statistics
    rounded = (costs.down_bytes + costs.up_bytes) // VALUE_BYTES - exact
    return messages * frame + rounded * DTYPES[dtype].itemsize + exact * VALUE_BYTES + costs.mask_bytes


class _Header(NamedTuple):
    dtype: str
    under: int
    values: int
    context: bytes


def _read_header(data: bytes, space: ParameterSpace, envelope: Envelope) -> _Header:
    """The header of the expected message, checked. All its numbers are within bounds."""
    if len(data) < _HEADER.size + CHECKSUM_BYTES or data[: len(MAGIC)] != MAGIC:
        raise WireError(f"The {len(data)} bytes are no message of fedspa.")
    _, version, kind, dtype, under, round, client, parameters, values, context = _HEADER.unpack_from(data)
    if version != VERSION:
        raise WireError(f"The message has version {version} of the wire format: only {VERSION} can be read.")
    checked_body(data)
    if kind >= len(KINDS) or dtype >= len(_CODES) or under not in _UNDER:
        raise WireError(f"The message's header is not valid: kind {kind}, value type {dtype}, mask {under}.")
    if (found := Envelope(KINDS[kind], round, client)) != envelope:
        raise WireError(f"The message is {found}, not {envelope}.")
    if parameters != space.total or not space.total - space.trained <= values <= parameters:
        raise WireError(
            f"The message holds {values} values for {parameters} parameters, the network has {space.total}."
        )
    return _Header(_CODES[dtype], under, values, context)


def _under(message: Message, known: PackedMask) -> int:
    """The code for the receiver's source of the values' mask."""
    if message.seed is not None:
        return _SEEDED
    if message.mask == known:
        return _KNOWN
    if message.mask == message.next_mask:
        return _NEXT
    raise ValueError("values must lie under a mask that the receiver has, receives, or draws from a seed")


def _changes(space: ParameterSpace, known: PackedMask, next_mask: PackedMask) -> tuple[list[int], np.ndarray]:
    """The change of each piece of a mask (a tensor, or a group of channels), and uint8 flags of those spelled out."""
    changes, spelled = [], [np.empty(0, np.uint8)]
    pieces = (space.mask_bits(mask.flags).split(space.mask_sizes) for mask in (known, next_mask))
    for old, new in zip(*pieces, strict=True):
        if torch.equal(old, new):
            changes.append(_SAME)
        elif not new.any():
            changes.append(_EMPTY)
        elif new.all():
            changes.append(_FULL)
        else:
            changes.append(_BITS)
            spelled.append(new.numpy().view(np.uint8))
    return changes, np.concatenate(spelled)


def _next_mask(space: ParameterSpace, known: PackedMask, changes: list[int], bits: np.ndarray) -> PackedMask:
    """The next mask, from the result of `_changes`."""
    flags = space.mask_bits(known.flags)
    spelled = torch.from_numpy(bits)
    for piece, change in zip(flags.split(space.mask_sizes), changes, strict=True):
        if change == _BITS:
            flags_of_tensor, spelled = spelled[: len(piece)], spelled[len(piece) :]
            piece.copy_(flags_of_tensor)
        elif change != _SAME:
            piece.fill_(change == _FULL)
    return PackedMask.pack(space.mask_of(flags))


def _table_bytes(tensors: int) -> int:
    return (2 * tensors + 7) // 8


def _pack_pairs(numbers: list[int]) -> bytes:
    """Pack numbers of two bits each."""
    return np.packbits([(number >> 1, number & 1) for number in numbers]).tobytes()


def _unpack_pairs(data: bytes, count: int) -> list[int]:
    pairs = np.unpackbits(np.frombuffer(data, np.uint8), count=2 * count).reshape(count, 2)
    return [2 * int(high) + int(low) for high, low in pairs]


def floats(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """The values in the bytes of a tensor: float32."""
    patterns = np.frombuffer(data, f"<i{dtype.itemsize}")  # NumPy has no bfloat16
    return torch.from_numpy(patterns.copy()).view(dtype).float()


def checksum(data: bytes) -> bytes:
    """The BLAKE2b digest at the end of a message."""
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


def checked_body(data: bytes) -> bytes:
    """A message without its checksum. Raises `WireError` if that is wrong."""
    body, end = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if end != checksum(body):
        raise WireError("The message is damaged: its checksum does not agree with its bytes.")
    return body


def _context(space: ParameterSpace, known: PackedMask, mask: PackedMask) -> bytes:
    """A digest of the facts that a reader needs but the message does not contain."""
    network = repr((space.names, space.shapes, space.statistics)).encode()
    return checksum(network + known.bits.numpy().tobytes() + mask.bits.numpy().tobytes())
