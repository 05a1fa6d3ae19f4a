"""The link between the server and its clients: a visit whose weights, updates and masks really travel."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from fedspa.client_state import MASK
from fedspa.masks.packed import PackedMask
from fedspa.methods.base import ClientTask, Method, Visit
from fedspa.methods.checking import checked_visit
from fedspa.records import Costs
from fedspa.rounds.requests import Request
from fedspa.rounds.wire import Envelope, Message, WireError, decode, encode
from fedspa.weights import ParameterSpace


class UpdateRefused(Exception):
    """The server could not read an update. Its sentence says why."""

    def __init__(self, reason: str, costs: Costs) -> None:
        """`costs`: what the visit cost all the same."""
        super().__init__(reason)
        self.costs = costs


@dataclass(frozen=True)
class Link:
    """Makes visits through the wire format; the method does not notice.

    With fp32 on the wire and float32 weights a visit gives what it gives without a link. With fp16 or bf16
    the client starts from rounded weights, and the server merges a rounded update; running statistics are not
    rounded.
    """

    space: ParameterSpace
    dtype: str
    """Of the values on the wire: fp32, fp16 or bf16."""

    def visit(
        self, method: Method, task: ClientTask, damage: Callable[[bytes], bytes] = lambda data: data
    ) -> Generator[Request, Any, Visit]:
        """`method.visit(task)`, with what it sends down and up encoded, counted and decoded.

        `damage` is what becomes of the update's bytes on their way. Raises `UpdateRefused` where the server cannot
        read them.
        """
        down, known = self._down(task)
        model, down_bytes = self._send(down, known)
        visit = yield from checked_visit(method, replace(task, weights=model.vector.to(task.weights)))
        if visit.update is None:
            return visit  # it trains on its own weights: neither message was needed

        mask = self._all if visit.holds is None else PackedMask.pack(visit.holds)
        next_mask = known if visit.state.mask is None else visit.state.mask
        up = Message(
            Envelope("update", task.round, task.client),
            vector=visit.update,
            mask=mask,
            next_mask=next_mask,
            seed=None if mask in (known, next_mask) else task.seed,
        )
        data = encode(up, self.space, known, self.dtype)
        costs = visit.costs + Costs(encoded_bytes=down_bytes + len(data))
        try:
            update = self._read(damage(data), up, known)
        except WireError as error:
            raise UpdateRefused(str(error), costs) from error
        return replace(
            visit,
            update=update.vector.to(visit.update),
            state=visit.state if update.next_mask is None else visit.state | {MASK: update.next_mask},
            costs=costs,
        )

    def down_bytes(self, task: ClientTask) -> int:
        """Bytes of the message with the server's weights."""
        return self._send(*self._down(task))[1]

    def _down(self, task: ClientTask) -> tuple[Message, PackedMask]:
        """The message with the server's weights, and the mask that both sides know."""
        known = self._all if task.state.mask is None else task.state.mask
        first_mask = task.first_visit and self._is_random(known)
        envelope = Envelope("model", task.round, task.client)
        return Message(envelope, task.weights, known, seed=task.seed if first_mask else None), known

    def _send(self, message: Message, known: PackedMask) -> tuple[Message, int]:
        """What arrives of a message, and its bytes."""
        data = encode(message, self.space, known, self.dtype)
        return self._read(data, message, known), len(data)

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
