"""The link between the server and its clients: a visit whose weights, updates and masks really travel."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from fedspa.masks.packed import PackedMask
from fedspa.methods.base import ClientTask, Method, Visit
from fedspa.records import Costs
from fedspa.requests import Request
from fedspa.weights import ParameterSpace
from fedspa.wire import Envelope, Message, decode, encode


@dataclass(frozen=True)
class Link:
    """Makes visits through the wire format; the method does not notice.

    With fp32 on the wire and float32 weights a visit gives what it gives without a link. With fp16 or bf16
    the client starts from rounded weights, and the server merges a rounded update.
    """

    space: ParameterSpace
    dtype: str
    """Of the values on the wire: fp32, fp16 or bf16."""

    def visit(self, method: Method, task: ClientTask) -> Generator[Request, Any, Visit]:
        """`method.visit(task)`, with what it sends down and up encoded, counted and decoded."""
        known = task.state if isinstance(task.state, PackedMask) else self._all
        first_mask = task.first_visit and self._is_random(known)
        down = Message(
            Envelope("model", task.round, task.client),
            vector=task.weights,
            mask=known,
            seed=task.seed if first_mask else None,
        )
        model, down_bytes = self._send(down, known)
        visit = yield from method.visit(replace(task, weights=model.vector.to(task.weights)))
        if visit.update is None:
            return visit  # it trains on its own weights: neither message was needed

        mask = self._all if visit.holds is None else PackedMask.pack(visit.holds)
        next_mask = visit.state if isinstance(visit.state, PackedMask) else known
        up = Message(
            Envelope("update", task.round, task.client),
            vector=visit.update,
            mask=mask,
            next_mask=next_mask,
            seed=None if mask in (known, next_mask) else task.seed,
        )
        update, up_bytes = self._send(up, known)
        return replace(
            visit,
            update=update.vector.to(visit.update),
            state=visit.state if update.next_mask is None else update.next_mask,
            costs=visit.costs + Costs(encoded_bytes=down_bytes + up_bytes),
        )

    def _send(self, message: Message, known: PackedMask) -> tuple[Message, int]:
        """What arrives of a message, and its bytes. A receiver draws a random mask as its sender did."""
        data = encode(message, self.space, known, self.dtype)
        arrived = decode(data, self.space, known, message.envelope, draw=lambda seed: message.mask)
        return arrived, len(data)

    def _is_random(self, mask: PackedMask) -> bool:
        """Whether anything about a first mask is left to chance: tensors neither full nor empty."""
        counts = self.space.count(mask.unpack(like=torch.empty(0)))
        return any(0 < count < size for count, size in zip(counts, self.space.sizes, strict=True))

    @cached_property
    def _all(self) -> PackedMask:
        return PackedMask.pack(torch.ones(self.space.total, dtype=torch.bool))
