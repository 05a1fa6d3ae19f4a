"""The wire format of further tensors, which travel beside the weights or an update.

Both sides know their names, shapes and dtypes, so only values travel: a header of 16 bytes (magic, version, kind
of message, 2 bytes of padding; round and client, 4 bytes each), the values in the order of the names, as fp32 and
little-endian, and 8 bytes of BLAKE2b as a checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import torch

from fedspa.communication.wire import (
    CHECKSUM_BYTES,
    KINDS,
    VERSION,
    Envelope,
    WireError,
    checked_body,
    checksum,
    floats,
)
from fedspa.core.tensor_file import as_bytes
from fedspa.costs.network import VALUE_BYTES

_HEADER = struct.Struct("<4s2B2x2I")


def message_bytes(values: int) -> int:
    """The bytes of a message of so many values; 0 without values."""
    return _HEADER.size + VALUE_BYTES * values + CHECKSUM_BYTES if values else 0


def encode_tensors(envelope: Envelope, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The bytes of named tensors; empty without tensors."""
    if not tensors:
        return b""
    body = _header(envelope) + b"".join(as_bytes(tensors[name].float()) for name in sorted(tensors))
    return body + checksum(body)


def decode_tensors(
    data: bytes, envelope: Envelope, like: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of a message, with shape, dtype and device of `like`. Raises `WireError` for damaged bytes."""
    if not like:
        return {}
    body, sizes = checked_body(data), {name: like[name].numel() for name in sorted(like)}
    if not body.startswith(_header(envelope)) or len(data) != message_bytes(sum(sizes.values())):
        raise WireError(f"The message does not hold the tensors of {envelope}.")
    pieces = floats(body[_HEADER.size :], torch.float32).split([*sizes.values()])
    return {
        name: piece.view(like[name].shape).to(like[name]) for name, piece in zip(sizes, pieces, strict=True)
    }


def _header(envelope: Envelope) -> bytes:
    return _HEADER.pack(b"FSPT", VERSION, KINDS.index(envelope.kind), envelope.round, envelope.client)
