"""The wire format of further tensors, which travel beside the weights or an update.

Both sides know their names, shapes and dtypes, so only values travel: a header of 16 bytes (magic, version, kind
of message, 2 bytes of padding; round and client, 4 bytes each), the values in the order of the names, as fp32 and
little-endian, and 8 bytes of BLAKE2b as a checksum.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping

import numpy as np
import torch

from fedspa.communication.wire import KINDS, VERSION, Envelope, WireError
from fedspa.costs.network import VALUE_BYTES

_HEADER = struct.Struct("<4s2B2x2I")
_MAGIC, _CHECKSUM_BYTES = b"FSPT", 8


def message_bytes(values: int) -> int:
    """The bytes of a message of so many values; 0 without values."""
    return _HEADER.size + VALUE_BYTES * values + _CHECKSUM_BYTES if values else 0


def encode_tensors(envelope: Envelope, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The bytes of named tensors; empty without tensors."""
    if not tensors:
        return b""
    header = _HEADER.pack(_MAGIC, VERSION, KINDS.index(envelope.kind), envelope.round, envelope.client)
    values = (tensors[name].detach().cpu().float().numpy() for name in sorted(tensors))
    body = header + b"".join(np.ascontiguousarray(value, "<f4").tobytes() for value in values)
    return body + _digest(body)


def decode_tensors(
    data: bytes, envelope: Envelope, like: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of a message, with shape, dtype and device of `like`. Raises `WireError` for damaged bytes."""
    if not like:
        return {}
    body, digest = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if digest != _digest(body):
        raise WireError("The message is damaged: its checksum does not agree with its bytes.")
    expected = _HEADER.pack(_MAGIC, VERSION, KINDS.index(envelope.kind), envelope.round, envelope.client)
    values = np.frombuffer(body, "<f4", offset=_HEADER.size)
    if body[: _HEADER.size] != expected or len(values) != sum(tensor.numel() for tensor in like.values()):
        raise WireError(f"The message does not hold the tensors of {envelope}.")
    found, place = {}, 0
    for name in sorted(like):
        tensor = like[name]
        piece = torch.from_numpy(values[place : place + tensor.numel()].copy())
        found[name] = piece.view(tensor.shape).to(tensor)
        place += tensor.numel()
    return found


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()
