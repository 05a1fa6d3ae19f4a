"""The link between the server and its clients: weights, updates and masks pass through the wire format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from fedspa.communication.wire import Envelope, Message, decode, encode
from fedspa.communication.wire_tensors import decode_tensors, encode_tensors
from fedspa.core.client import ClientUpdate
from fedspa.core.client_state import MASK
from fedspa.core.packed_mask import PackedMask
from fedspa.core.server import ServerState
from fedspa.core.weights import ParameterSpace


class EncodedUpdate(NamedTuple):
    """An encoded update on its way to the server."""

    envelope: Envelope
    message: Message | None
    """None if no weights are sent."""
    known: PackedMask
    """The mask that both sides knew before."""
    data: bytes
    further: bytes
    """The encoded further tensors of the update."""

    @property
    def length(self) -> int:
        """The length in bytes."""
        return len(self.data) + len(self.further)


@dataclass(frozen=True)
class Link:
    """Encodes and decodes all messages. A method does not notice it.

    With fp32 on the wire and float32 weights a client's update is the same as without a link. With fp16 or bf16
    the client starts from rounded weights, and the server merges a rounded update; running statistics are not
    rounded.
    """

    space: ParameterSpace
    dtype: str
    """The type of the values on the wire: fp32, fp16 or bf16."""
    seed: int
    """The seed of the run, from which random masks are drawn."""

    def down(
        self,
        server: ServerState,
        mask: PackedMask | None,
        *,
        round: int,
        client: int,
        first: bool,
        weights: bool = True,
    ) -> tuple[ServerState, int]:
        """The server's state as a client receives it, and the bytes of the message.

        Args:
            mask: the client's mask, which both sides know; None for a dense model. Weights travel under it, or
                under the mask that all clients share, whose bits then travel too.
            first: True if the client has not completed any update yet. A random mask then travels as a seed.
            weights: False if only further tensors travel.
        """
        envelope = Envelope("model", round, client)
        further = encode_tensors(envelope, server.further)
        tensors = decode_tensors(further, envelope, server.further)
        if not weights:
            return replace(server, tensors=tensors), len(further)
        known = self._all if mask is None else mask
        shared = server.mask or known
        drawn = first and shared == known and server.neighbours is None and self._is_random(known)
        seed = self.seed if drawn else None
        message = Message(envelope, server.weights, shared, next_mask=shared, seed=seed)
        data = encode(message, self.space, known, self.dtype)
        arrived = self._read(data, message, known)
        if server.mask is not None:
            tensors[MASK] = (arrived.next_mask or known).bits
        vector = arrived.vector.to(server.weights)
        return replace(server, weights=vector, tensors=tensors), len(data) + len(further)

    def encode_update(
        self, update: ClientUpdate, known: PackedMask | None, *, round: int, client: int
    ) -> EncodedUpdate:
        """The message of an update. `known`: the mask that both sides knew before; None for a dense model."""
        assert update.state is not None
        before, envelope = self._all if known is None else known, Envelope("update", round, client)
        further = encode_tensors(envelope, update.tensors)
        if update.update is None:
            return EncodedUpdate(envelope, None, before, b"", further)
        mask = self._all if update.mask is None else PackedMask.pack(update.mask).on_cpu()
        next_mask = before if update.state.mask is None else update.state.mask
        message = Message(
            envelope,
            vector=update.update,
            mask=mask,
            next_mask=next_mask,
            seed=None if mask in (before, next_mask) else self.seed,
        )
        data = encode(message, self.space, before, self.dtype)
        return EncodedUpdate(envelope, message, before, data, further)

    def decode_update(self, encoded: EncodedUpdate, update: ClientUpdate) -> ClientUpdate:
        """The update as the server reads it. Raises `WireError` if the bytes are damaged."""
        assert update.state is not None
        tensors = decode_tensors(encoded.further, encoded.envelope, update.tensors)
        if encoded.message is None:
            return replace(update, tensors=tensors)
        arrived = self._read(encoded.data, encoded.message, encoded.known)
        state = update.state if arrived.next_mask is None else update.state | {MASK: arrived.next_mask}
        return replace(update, update=arrived.vector.to(encoded.message.vector), state=state, tensors=tensors)

    def _read(self, data: bytes, sent: Message, known: PackedMask) -> Message:
        """The message as the receiver reads it. The sender's mask stands for the mask drawn from the seed."""
        return decode(data, self.space, known, sent.envelope, draw=lambda seed: sent.mask)

    def _is_random(self, mask: PackedMask) -> bool:
        """True if a first mask is random in some tensor: one that is neither full nor empty."""
        counts = self.space.count(mask.unpack(like=torch.empty(0)))
        return any(0 < count < size for count, size in zip(counts, self.space.sizes, strict=True))

    @cached_property
    def _all(self) -> PackedMask:
        return PackedMask.pack(torch.ones(self.space.total, dtype=torch.bool))
