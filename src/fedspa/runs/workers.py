"""Worker processes: forks of this process that do the clients' jobs."""

from __future__ import annotations

import ctypes
import heapq
import io
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fedspa.core.errors import UserError
from fedspa.core.server import ServerState
from fedspa.federated.client_runner import ClientRunner
from fedspa.federated.jobs import Job
from fedspa.runs.interruption import SIGNALS
from fedspa.runs.memory import keep_freed_memory
from fedspa.runs.remote_errors import portable

_PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


AHEAD = 64
"""Answers of a round that wait for their turn at most."""


class Workers:
    """Worker processes on the CPU, one intra-op thread each.

    They are forks of the ready process: data, network and partition are shared with it, nothing is sent to
    them but the server's state, which lies in shared memory, and a client's state. Since a result is a
    function of its job alone, the results are those of `InProcess`, bit for bit.
    """

    def __init__(self, runner: ClientRunner, count: int, server: ServerState) -> None:
        """`count` processes; `server` has the shapes and dtypes of every later state."""
        self._work = runner.work
        shared = {name: _shared_like(tensor) for name, tensor in server.tensors.items()}
        self._server = ServerState(_shared_like(server.weights), shared)
        context = multiprocessing.get_context("fork")
        self._links: list[Connection] = []
        self._processes = []
        self._due: dict[Connection, int] = {}
        """Workers that are busy, each with the place of its job among those of the round."""
        for _ in range(count):
            here, there = context.Pipe()
            self._links.append(here)
            args = (runner, self._server, there, list(self._links), os.getpid())
            process = context.Process(target=_work, args=args, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)

    def run(self, jobs: Sequence[Job], server: ServerState) -> Iterator[Any]:
        """The largest jobs are begun first, so that no worker ends long after the others; but none that is `AHEAD`
        places or more from the next answer, so that few answers wait in memory for their turn.

        A job's exception is raised in its turn, as `InProcess` does. Raises `UserError` where a worker dies.
        """
        for link in list(
            self._due
        ):  # of jobs that were given up, after an exception; they read the server's state
            self._receive(link)
        self._server.weights.copy_(server.weights)
        for name, tensor in server.tensors.items():
            self._server[name].copy_(tensor)
        idle, answers = list(self._links), dict[int, Any]()
        waiting: list[tuple[int, int]] = []  # a heap: the largest job first, of equal ones the earliest
        known = 0
        for index in range(len(jobs)):
            while known < min(index + AHEAD, len(jobs)):
                heapq.heappush(waiting, (-self._work(jobs[known]), known))
                known += 1
            self._begin(jobs, waiting, idle)
            while index not in answers:
                ready = wait(list(self._due))
                for link in [link for link in self._due if link in ready]:
                    place, answer = self._receive(link)
                    answers[place] = answer
                    idle.append(link)
                self._begin(jobs, waiting, idle)
            answer = answers.pop(index)
            if isinstance(answer, BaseException):
                raise answer
            yield answer

    def _begin(self, jobs: Sequence[Job], waiting: list[tuple[int, int]], idle: list[Connection]) -> None:
        """Give the idle workers what waits."""
        while idle and waiting:
            _, place = heapq.heappop(waiting)
            self._send(idle.pop(), place, jobs)

    def _send(self, link: Connection, place: int, jobs: Sequence[Job]) -> None:
        try:
            _send(link, jobs[place])
        except OSError as error:
            raise self._ended_early(link) from error
        self._due[link] = place

    def _receive(self, link: Connection) -> tuple[int, Any]:
        """The place of a job among those of its round, and its answer or exception."""
        try:
            answer = _receive(link)
        except (EOFError, OSError) as error:
            raise self._ended_early(link) from error
        return self._due.pop(link), answer

    def _ended_early(self, link: Connection) -> UserError:
        process = self._processes[self._links.index(link)]
        process.join(timeout=1)  # its exit code is known only then
        code = process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return UserError(
            f"A worker process ended in the middle of a round ({how}): if memory ran out, lower "
            f"hardware.workers={len(self._processes)}; with hardware.workers=1 there are none."
        )

    def close(self) -> None:
        """End the workers, busy or not."""
        for process in self._processes:
            process.kill()  # they ignore what asks to end
        for process in self._processes:
            process.join()
        for link in self._links:
            link.close()


def _shared_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for such a tensor that forks of this process share."""
    # Anonymous memory is not bounded by the size of /dev/shm, which is 64 MB in many a container.
    memory = mmap.mmap(-1, max(tensor.nbytes, 1))
    return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)


def _work(
    runner: ClientRunner, server: ServerState, link: Connection, parents: Sequence[Connection], parent: int
) -> None:
    """A worker's life: take a job, answer with its outcome or with the exception it raised.

    `parents`: the parent's ends of pipes that came along with the fork. While anybody holds the parent's end of
    `link`, the link does not close when the parent dies. `parent`: its process id.
    """
    for number in SIGNALS:  # they reach the whole group; the parent decides what to do, and ends us
        signal.signal(number, signal.SIG_IGN)
    _die_with(parent)
    for end in parents:
        end.close()
    torch.set_num_threads(1)
    keep_freed_memory()
    while True:
        try:
            job = _receive(link)
        except (EOFError, OSError):  # the parent is gone
            return
        try:
            answer: Any = runner.perform(job, server)
        except Exception as error:
            answer = portable(error, "a worker process")
        try:
            _send(link, answer)
        except OSError:
            return


def _die_with(parent: int) -> None:
    """Have Linux kill this process once its parent is gone, however that ends; at once if it is gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


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
