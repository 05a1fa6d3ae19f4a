"""Who does the clients' work: this process, or worker processes that are forks of it."""

from __future__ import annotations

import io
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch

from fedspa.visitor import Job, Visitor


class Executor(Protocol):
    """Has a visitor do jobs, all from the same global weights [total]."""

    def run(self, jobs: Sequence[Job], weights: torch.Tensor) -> Iterator[Any]:
        """What `Visitor.perform` gives, in the order of the jobs, whatever the order in which they end."""

    def close(self) -> None:
        """Give back what the executor holds."""


class InProcess:
    """One job after another."""

    def __init__(self, visitor: Visitor) -> None:
        self._visitor = visitor

    def run(self, jobs: Sequence[Job], weights: torch.Tensor) -> Iterator[Any]:
        for job in jobs:
            yield self._visitor.perform(job, weights)

    def close(self) -> None:
        """Nothing is held."""


class Workers:
    """Worker processes on the CPU, one intra-op thread each.

    They are forks of the ready process: data, network and partition are shared with it, nothing is sent to
    them but the global weights, which lie in shared memory, and a client's state. Since a visit is a
    function of its job alone, the results are those of `InProcess`, bit for bit.
    """

    def __init__(self, visitor: Visitor, count: int, parameters: int, dtype: torch.dtype) -> None:
        """`count` processes; `parameters` and `dtype` of the global weights."""
        self._sizes = [len(rows) for rows in visitor.client_rows]
        # Anonymous memory is not bounded by the size of /dev/shm, which is 64 MB in many a container.
        self._weights = torch.frombuffer(mmap.mmap(-1, parameters * dtype.itemsize), dtype=dtype)
        context = multiprocessing.get_context("fork")
        self._links: list[Connection] = []
        self._processes = []
        for _ in range(count):
            here, there = context.Pipe()
            self._links.append(here)
            args = (visitor, self._weights, there, list(self._links))
            process = context.Process(target=_work, args=args, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)

    def run(self, jobs: Sequence[Job], weights: torch.Tensor) -> Iterator[Any]:
        """The largest clients are begun first, so that no worker ends long after the others."""
        self._weights.copy_(weights)
        waiting = sorted(range(len(jobs)), key=lambda index: self._sizes[jobs[index].client])
        busy: dict[Connection, int] = {}
        outcomes: dict[int, Any] = {}
        for link in self._links[: len(jobs)]:
            busy[link] = self._send(link, waiting, jobs)
        for index in range(len(jobs)):
            while index not in outcomes:
                ready = wait(list(busy))
                for link in [link for link in busy if link in ready]:
                    outcomes[busy.pop(link)] = self._receive(link)
                    if waiting:
                        busy[link] = self._send(link, waiting, jobs)
            yield outcomes.pop(index)

    def _send(self, link: Connection, waiting: list[int], jobs: Sequence[Job]) -> int:
        index = waiting.pop()
        try:
            _send(link, jobs[index])
        except OSError as error:
            raise self._ended_early(link) from error
        return index

    def _receive(self, link: Connection) -> Any:
        try:
            answer = _receive(link)
        except (EOFError, OSError) as error:
            raise self._ended_early(link) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _ended_early(self, link: Connection) -> RuntimeError:
        process = self._processes[self._links.index(link)]
        process.join(timeout=1)  # its exit code is known only then
        return RuntimeError(
            f"a worker process ended early (exit code {process.exitcode}): out of memory? Try hardware.workers=1"
        )

    def close(self) -> None:
        """End the workers, busy or not."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for link in self._links:
            link.close()


def _work(visitor: Visitor, weights: torch.Tensor, link: Connection, parents: Sequence[Connection]) -> None:
    """A worker's life: take a job, answer with its outcome or with the exception it raised.

    `parents`: the parent's ends of pipes that came along with the fork. While anybody holds the parent's end of
    `link`, the link does not close when the parent dies.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for end in parents:
        end.close()
    torch.set_num_threads(1)
    while True:
        try:
            job = _receive(link)
        except (EOFError, OSError):  # the parent is gone
            return
        try:
            answer: Any = visitor.perform(job, weights)
        except Exception as error:
            error.add_note(f"In a worker process:\n{traceback.format_exc()}")
            answer = error
        try:
            _send(link, answer)
        except OSError:
            return


class _Pickler(pickle.Pickler):
    """Tensors travel by value. Torch's own way, through shared memory, keeps a file open for each of them: a
    thousand clients with a state would be too many for most systems."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return torch.from_numpy, (item.numpy(),)
        return NotImplemented


def _send(link: Connection, item: Any) -> None:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(item)
    link.send_bytes(buffer.getbuffer())


def _receive(link: Connection) -> Any:
    return pickle.loads(link.recv_bytes())


def can_fork() -> bool:
    """Whether workers can be forks of this process: on Linux, from a process that computes on one thread."""
    forks = sys.platform == "linux" and "fork" in multiprocessing.get_all_start_methods()
    return forks and torch.get_num_threads() == 1


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
