"""Visits that advance in lockstep: an engine answers their requests of one kind together."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from fedspa.engines.base import Engine
from fedspa.rounds.clock import Clock
from fedspa.rounds.requests import Request

T = TypeVar("T")

Dialogue: TypeAlias = Generator[Request, Any, T]
"""Yields requests, is sent their answers, and returns a result."""


def relayed(
    dialogue: Dialogue[T], ask: Callable[[Request], Request], hear: Callable[[Request, Any], Any]
) -> Dialogue[T]:
    """The dialogue through somebody who asks what `ask` makes of its requests, and tells it what `hear` makes of each
    of its requests and the answer to what was asked; an error of either ends it."""
    answer: Any = None
    while True:
        try:
            request = dialogue.send(answer)
        except StopIteration as end:
            return end.value
        answer = hear(request, (yield ask(request)))


def run_in_lockstep(dialogues: Sequence[Dialogue[T]], engine: Engine, clocks: Sequence[Clock]) -> list[T]:
    """The results of dialogues that go on side by side.

    Those that wait for the same kind of request are answered by one call of the engine, whose seconds they share
    in equal parts on their clocks.
    """
    results: dict[int, T] = {}
    waiting: dict[int, Request] = {}

    def go_on(index: int, answer: Any) -> None:
        try:
            waiting[index] = dialogues[index].send(answer)
        except StopIteration as end:
            results[index] = end.value

    for index in range(len(dialogues)):
        go_on(index, None)
    while waiting:
        kind = type(next(iter(waiting.values())))
        asking = [index for index, request in waiting.items() if isinstance(request, kind)]
        requests = [waiting.pop(index) for index in asking]
        begin = time.perf_counter()
        answers = engine.answer(requests)
        if (
            engine.device.type == "cuda"
        ):  # its work would count for whoever reads an answer first, which is at once
            torch.cuda.synchronize(engine.device)
        share = (time.perf_counter() - begin) / len(asking)
        for index, answer in zip(asking, answers, strict=True):
            clocks[index].seconds[kind.phase] += share
            go_on(index, answer)
    return [results[index] for index in range(len(dialogues))]
