"""Who makes a round's visits: this process, or worker processes that are forks of it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Protocol

import torch
import torch.multiprocessing

from fedspa.visitor import Call, Outcome, Visitor


class Executor(Protocol):
    """Makes the visits of a round, all from the same global weights [total]."""

    def visits(self, calls: Sequence[Call], weights: torch.Tensor) -> Iterator[Outcome]:
        """The outcomes in the order of the calls, whatever the order in which they come about."""

    def close(self) -> None:
        """Give back what the executor holds."""


class InProcess:
    """One visit after another."""

    def __init__(self, visitor: Visitor) -> None:
        self._visitor = visitor

    def visits(self, calls: Sequence[Call], weights: torch.Tensor) -> Iterator[Outcome]:
        for call in calls:
            yield self._visitor.visit(call, weights)

    def close(self) -> None:
        """Nothing is held."""


class Workers:
    """Worker processes on the CPU, one intra-op thread each.

    They are forks of the ready process: data, network and partition are shared with it, nothing is sent to
    them but the global weights, which lie in shared memory, and a client's state. Since a visit is a
    function of its call alone, the results are those of `InProcess`, bit for bit.
    """

    def __init__(self, visitor: Visitor, count: int, parameters: int, dtype: torch.dtype) -> None:
        """`count` processes; `parameters` and `dtype` of the global weights."""
        self._sizes = [len(rows) for rows in visitor.client_rows]
        self._weights = torch.empty(parameters, dtype=dtype).share_memory_()
        context = torch.multiprocessing.get_context("fork")
        self._links: list[Connection] = []
        self._processes = []
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(visitor, self._weights, there), daemon=True)
            process.start()
            there.close()
            self._links.append(here)
            self._processes.append(process)

    def visits(self, calls: Sequence[Call], weights: torch.Tensor) -> Iterator[Outcome]:
        """The largest clients are begun first, so that no worker ends long after the others."""
        self._weights.copy_(weights)
        waiting = sorted(range(len(calls)), key=lambda index: self._sizes[calls[index].client])
        busy: dict[Connection, int] = {}
        outcomes: dict[int, Outcome] = {}
        for link in self._links[: len(calls)]:
            busy[link] = self._send(link, waiting, calls)
        for index in range(len(calls)):
            while index not in outcomes:
                ready = wait(list(busy))
                for link in [link for link in busy if link in ready]:
                    outcomes[busy.pop(link)] = self._receive(link)
                    if waiting:
                        busy[link] = self._send(link, waiting, calls)
            yield outcomes.pop(index)

    @staticmethod
    def _send(link: Connection, waiting: list[int], calls: Sequence[Call]) -> int:
        index = waiting.pop()
        link.send(calls[index])
        return index

    def _receive(self, link: Connection) -> Outcome:
        try:
            answer = link.recv()
        except EOFError as error:
            code = self._processes[self._links.index(link)].exitcode
            raise RuntimeError(
                f"a worker process ended early (exit code {code}): out of memory? Try hardware.workers=1"
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """End the workers, busy or not."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for link in self._links:
            link.close()


def _work(visitor: Visitor, weights: torch.Tensor, link: Connection) -> None:
    """A worker's life: take a call, answer with its outcome or with the exception it raised."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    while True:
        try:
            call = link.recv()
        except EOFError:  # the parent is gone
            return
        try:
            answer: Outcome | Exception = visitor.visit(call, weights)
        except Exception as error:
            answer = error
        link.send(answer)


def can_fork() -> bool:
    """Whether workers can be forks of this process: on Linux, from a process that computes on one thread."""
    forks = sys.platform == "linux" and "fork" in multiprocessing.get_all_start_methods()
    return forks and torch.get_num_threads() == 1


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
