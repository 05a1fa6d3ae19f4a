"""The link between the server and its clients: weights, updates and masks that really travel."""

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
    """An update on its way to the server."""

    envelope: Envelope
    message: Message | None
    """None where no weights are sent."""
    known: PackedMask
    """The mask that both sides knew before."""
    data: bytes
    further: bytes
    """The update's further tensors."""

    @property
    def length(self) -> int:
        """In bytes."""
        return len(self.data) + len(self.further)


@dataclass(frozen=True)
class Link:
    """Sends messages in the wire format; a method does not notice.

    With fp32 on the wire and float32 weights a client's update is what it is without a link. With fp16 or bf16
    the client starts from rounded weights, and the server merges a rounded update; running statistics are not
    rounded.
    """

    space: ParameterSpace
    dtype: str
    """Of the values on the wire: fp32, fp16 or bf16."""
    seed: int
    """Of the run: random masks are drawn from it."""

    def down(
        self, server: ServerState, mask: PackedMask | None, *, round: int, client: int, first: bool
    ) -> tuple[ServerState, int]:
        """The server's state as a client receives it, and the bytes of the message.

        Args:
            mask: of the client, which both sides know; None where the model is dense.
            first: whether the client has not completed any update yet, so that a random mask comes along as a seed.
        """
        known = self._all if mask is None else mask
        seed = self.seed if first and self._is_random(known) else None
        envelope = Envelope("model", round, client)
        message = Message(envelope, server.weights, known, seed=seed)
        data = encode(message, self.space, known, self.dtype)
        further = encode_tensors(envelope, server.tensors)
        weights = self._read(data, message, known).vector.to(server.weights)
        tensors = decode_tensors(further, envelope, server.tensors)
        return ServerState(weights, tensors, server.kept), len(data) + len(further)

    def encode_update(
        self, update: ClientUpdate, known: PackedMask | None, *, round: int, client: int
    ) -> EncodedUpdate:
        """The message of an update. `known`: the mask that both sides knew before; None where the model is dense."""
        assert update.state is not None
        before, envelope = self._all if known is None else known, Envelope("update", round, client)
        further = encode_tensors(envelope, update.tensors)
        if update.update is None:
            return EncodedUpdate(envelope, None, before, b"", further)
        mask = self._all if update.mask is None else PackedMask.pack(update.mask)
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
        """The update as the server reads it. Raises `WireError` where the bytes are damaged."""
        assert update.state is not None
        tensors = decode_tensors(encoded.further, encoded.envelope, update.tensors)
        if encoded.message is None:
            return replace(update, tensors=tensors)
        arrived = self._read(encoded.data, encoded.message, encoded.known)
        state = update.state if arrived.next_mask is None else update.state | {MASK: arrived.next_mask}
        return replace(update, update=arrived.vector.to(encoded.message.vector), state=state, tensors=tensors)

    def _read(self, data: bytes, sent: Message, known: PackedMask) -> Message:
        """What a receiver reads. It draws a random mask as the sender did."""
        return decode(data, self.space, known, sent.envelope, draw=lambda seed: sent.mask)

    def _is_random(self, mask: PackedMask) -> bool:
        """Whether anything about a first mask is left to chance: tensors neither full nor empty."""
        counts = self.space.count(mask.unpack(like=torch.empty(0)))
        return any(0 < count < size for count, size in zip(counts, self.space.sizes, strict=True))

    @cached_property
    def _all(self) -> PackedMask:
        return PackedMask.pack(torch.ones(self.space.total, dtype=torch.bool))
