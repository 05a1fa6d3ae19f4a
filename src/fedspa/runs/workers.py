"""Worker processes: forks of this process that run the clients' jobs."""

from __future__ import annotations

import ctypes
import heapq
import mmap
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from fedspa.core.errors import UserError
from fedspa.core.server import ServerState
from fedspa.federated.client_runner import ClientRunner
from fedspa.federated.jobs import Job
from fedspa.runs.interruption import SIGNALS
from fedspa.runs.memory import keep_freed_memory
from fedspa.runs.pickling import pack, portable, unpack

_PR_SET_PDEATHSIG = 1
"""A constant of prctl(2)."""


AHEAD = 64
"""The largest number of results of a round that wait for their turn."""


class Workers:
    """Worker processes on the CPU, with one intra-op thread each.

    They are forks of the ready process, so they share its data, network and partition. They get only the server's
    state, which is in shared memory, and the clients' states. A result depends on its job alone, so the
    results are those of `InProcess`, bit for bit.
    """

    def __init__(self, runner: ClientRunner, count: int, server: ServerState) -> None:
        """Start `count` processes; `server` has the shapes and dtypes of every later state."""
        self._work, self._count = runner.work, count
        shared = {name: _shared_like(tensor) for name, tensor in server.tensors.items()}
        self._server = ServerState(_shared_like(server.weights), shared)
        self._running: dict[Future[bytes], int] = {}
        """The running jobs, each with its place among the jobs of the round."""
        others = multiprocessing.active_children()
        fork = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(count, fork, _begin_worker, (runner, self._server, os.getpid()))
        self._pool.submit(int).result()  # fork all workers now, before this process has further threads
        self._processes = [child for child in multiprocessing.active_children() if child not in others]

    def run(self, jobs: Sequence[Job], server: ServerState) -> Iterator[Any]:
        """Yield the results in the order of the jobs.

        The largest jobs begin first, so that no worker ends long after the others. But a job only begins if it is less
        than `AHEAD` places after the next result, so that few results wait in memory.

        A job's exception is raised in its turn, as in `InProcess`. Raises `UserError` if a worker dies.
        """
        wait(self._running)  # jobs of an abandoned round still read the server's state
        self._running.clear()
        self._server.weights.copy_(server.weights)
        for name, tensor in server.tensors.items():
            self._server[name].copy_(tensor)
        results: dict[int, Future[bytes]] = {}
        waiting: list[tuple[int, int]] = []  # a heap: the largest job first, of equal ones the earliest
        known = 0
        for place in range(len(jobs)):
            while known < min(place + AHEAD, len(jobs)):
                heapq.heappush(waiting, (-self._work(jobs[known]), known))
                known += 1
            self._begin(jobs, waiting)
            while place not in results:
                done, _ = wait(self._running, return_when=FIRST_COMPLETED)
                results |= {self._running.pop(future): future for future in done}
                self._begin(jobs, waiting)
            result = self._result(results.pop(place))
            if isinstance(result, BaseException):
                raise result
            yield result

    def _begin(self, jobs: Sequence[Job], waiting: list[tuple[int, int]]) -> None:
        """Give each worker a job, and keep one more ready."""
        while waiting and len(self._running) <= self._count:
            _, place = heapq.heappop(waiting)
            try:
                self._running[self._pool.submit(_perform, pack(jobs[place]))] = place
            except BrokenProcessPool as error:
                raise self._died() from error

    def _result(self, future: Future[bytes]) -> Any:
        try:
            return unpack(future.result())
        except BrokenProcessPool as error:
            raise self._died() from error

    def _died(self) -> UserError:
        return UserError(
            "A worker process died in the middle of a round: if memory ran out, lower "
            f"hardware.workers={self._count}; with hardware.workers=1 there are none."
        )

    def close(self) -> None:
        """End the workers, busy or not."""
        for process in self._processes:
            process.kill()  # workers ignore signals that ask them to end
        self._pool.shutdown()


def _shared_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor of this kind that forks of this process share."""
    # Anonymous memory is not limited by the size of /dev/shm, which is 64 MB in many containers.
    memory = mmap.mmap(-1, max(tensor.nbytes, 1))
    return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)


_place: tuple[ClientRunner, ServerState]
"""In a worker: the runner of the jobs, and the server's state in shared memory."""


def _begin_worker(runner: ClientRunner, server: ServerState, parent: int) -> None:
    """Prepare a worker. `parent`: the process id of the parent."""
    global _place
    _place = runner, server
    for number in SIGNALS:  # they reach the whole group; the parent decides, and ends the workers
        signal.signal(number, signal.SIG_IGN)
    # Linux kills this process when its parent ends for any reason.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    torch.set_num_threads(1)
    keep_freed_memory()


def _perform(job: bytes) -> bytes:
    """Run a packed job in a worker. Returns its packed result, or the exception that it raised."""
    runner, server = _place
    try:
        return pack(runner.perform(unpack(job), server))
    except Exception as error:
        return pack(portable(error, "a worker process"))


def can_fork() -> bool:
    """True if workers can be forks of this process: on Linux, if it computes on one thread."""
    forks = sys.platform == "linux" and "fork" in multiprocessing.get_all_start_methods()
    return forks and torch.get_num_threads() == 1
