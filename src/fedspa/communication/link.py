"""The link between the server and its clients: weights, updates and masks pass through the wire format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fedspa.communication.wire import Envelope, Message, decode, encode
from fedspa.communication.wire_tensors import decode_tensors, encode_tensors
from fedspa.core.client import ClientUpdate
from fedspa.core.client_state import MASK
from fedspa.core.packed_mask import PackedMask
from fedspa.core.server import ServerState
from fedspa.core.weights import ParameterSpace


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
        envelope: Envelope,
        *,
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
        further = encode_tensors(envelope, server.further)
        tensors = decode_tensors(further, envelope, server.further)
        if not weights:
            return replace(server, tensors=tensors), len(further)
        known = mask or self._all
        shared = server.mask or known
        drawn = first and shared == known and server.neighbours is None and self._is_random(known)
        seed = self.seed if drawn else None
        message = Message(envelope, server.weights, shared, next_mask=shared, seed=seed)
        data = encode(message, self.space, known, self.dtype)
        arrived = decode(data, self.space, known, envelope, lambda seed: shared)
        if server.mask is not None:
            tensors[MASK] = (arrived.next_mask or known).bits
        vector = arrived.vector.to(server.weights)
        return replace(server, weights=vector, tensors=tensors), len(data) + len(further)

    def encode_update(
        self, update: ClientUpdate, known: PackedMask | None, envelope: Envelope
    ) -> list[bytes]:
        """Two messages of an update: its weights, and its further tensors. A message without content is empty.

        `known`: the mask that both sides knew before; None for a dense model.
        """
        assert update.state is not None
        further = encode_tensors(envelope, update.tensors)
        if update.update is None:
            return [b"", further]
        before, mask = known or self._all, self._mask(update)
        next_mask = update.state.mask or before
        seed = None if mask in (before, next_mask) else self.seed
        message = Message(envelope, update.update, mask, next_mask, seed)
        return [encode(message, self.space, before, self.dtype), further]

    def decode_update(
        self, messages: Sequence[bytes], update: ClientUpdate, known: PackedMask | None, envelope: Envelope
    ) -> ClientUpdate:
        """The update as the server reads it. Raises `WireError` if the bytes are damaged."""
        assert update.state is not None
        weights, further = messages
        tensors = decode_tensors(further, envelope, update.tensors)
        if update.update is None:
            return replace(update, tensors=tensors)
        # The sender's mask stands for the mask that the receiver draws from the seed.
        drawn: Callable[[int], PackedMask] = lambda seed: self._mask(update)  # noqa: E731
        arrived = decode(weights, self.space, known or self._all, envelope, drawn)
        state = update.state if arrived.next_mask is None else update.state | {MASK: arrived.next_mask}
        return replace(update, update=arrived.vector.to(update.update), state=state, tensors=tensors)

    def _mask(self, update: ClientUpdate) -> PackedMask:
        """The mask that the values of an update lie under."""
        return self._all if update.mask is None else PackedMask.pack(update.mask).on_cpu()

    def _is_random(self, mask: PackedMask) -> bool:
        """True if a first mask is random in some tensor: one that is neither full nor empty."""
        counts = self.space.count(mask.flags)
        return any(0 < count < size for count, size in zip(counts, self.space.sizes, strict=True))

    @cached_property
    def _all(self) -> PackedMask:
        return PackedMask.pack(torch.ones(self.space.total, dtype=torch.bool))
