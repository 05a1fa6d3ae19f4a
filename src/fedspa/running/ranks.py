"""One run in several processes, the ranks of torch.distributed: on one machine or many, on CPUs or a GPU each.

Every rank holds the whole state of the federation and runs the same loop. Only the jobs of the clients are
shared out: each rank does its own, the answers go round, and every rank folds all of them in client order. So
the state of all ranks stays the same, and is that of a single process, bit for bit where the machines compute
alike: nothing depends on which rank did a job.
"""

from __future__ import annotations

import heapq
import io
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from fedspa.errors import UserError
from fedspa.rounds.visitor import Job
from fedspa.running.executor import Executor

T = TypeVar("T")


class RankGroup:
    """The processes of a run; a run in one process is a group of one, which has nobody to talk to.

    The others' words travel by collectives on the CPU (gloo), which every rank must enter in the same order.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """`size` above 1 needs torch.distributed to be initialised with a backend for the CPU."""
        self.rank, self.size = rank, size

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes files, tracks and speaks."""
        return self.rank == 0

    def gather(self, item: T) -> list[T]:
        """What each rank has, by rank. Small things: they are pickled."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        with _noticing_lost_ranks():
            torch.distributed.all_gather_object(items, item)
        return items

    def broadcast(self, item: T, source: int = 0) -> T:
        """What rank `source` has."""
        if self.size == 1:
            return item
        items = [item]
        with _noticing_lost_ranks():
            torch.distributed.broadcast_object_list(items, source)
        return items[0]

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a contiguous tensor on the CPU, of any dtype, by that of rank `source`."""
        if tensor.numel() and self.size > 1:
            with _noticing_lost_ranks():
                torch.distributed.broadcast(tensor.view(-1).view(torch.uint8), source)

    @contextmanager
    def synchronised(self) -> Iterator[None]:
        """What one rank raises in here, all ranks raise at its end: none is left waiting for another."""
        error: Exception | None = None
        try:
            yield
        except RankLost:
            raise
        except Exception as raised:
            error = raised
        if self.size > 1:
            error = next((told for told in self.gather(_portable(error, self.rank)) if told), None)
        if error:
            raise error

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class RankLost(UserError):
    """Another rank is gone without a word."""


@contextmanager
def _noticing_lost_ranks() -> Iterator[None]:
    """A collective that fails means that another process is gone."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(
            "Another process of this run ended early (killed, out of memory, or its machine is gone), so that "
            "the run cannot go on."
        ) from error


class Ranks:
    """An executor that shares jobs out among the ranks of a group, each of which has an executor of its own."""

    def __init__(
        self, own: Executor, group: RankGroup, work: Callable[[Job], float], device: torch.device
    ) -> None:
        """
        Args:
            own: does this rank's jobs.
            work: how much a job is, in any unit; the same on every rank.
            device: where this rank's answers lie, but for what they hold on the CPU.
        """
        self._own, self._group, self._work, self._device = own, group, work, device

    def run(self, jobs: Sequence[Job], weights: torch.Tensor) -> Iterator[Any]:
        """The answers to all jobs, on every rank. Raises on every rank what the first job to fail raised."""
        owners = share_out([self._work(job) for job in jobs], self._group.size)
        mine = [index for index, owner in enumerate(owners) if owner == self._group.rank]
        answers, error = self._do([jobs[index] for index in mine], weights)
        packed = [Packed.of(answer) for answer in answers]
        failure = (mine[len(answers)], _portable(error, self._group.rank)) if error else None
        told = self._group.gather((failure, [(item.pickled, item.layouts) for item in packed]))
        if failures := [failed for failed, _ in told if failed]:
            _, first = min(failures, key=lambda failed: failed[0])
            assert first is not None
            raise first
        done = dict(zip(mine, zip(packed, answers, strict=True), strict=True))
        outlines = [iter(outline) for _, outline in told]
        for index, owner in enumerate(owners):
            outline = next(outlines[owner])
            if owner == self._group.rank:
                sent, answer = done.pop(index)
                for tensor in sent.tensors:
                    self._group.broadcast_tensor(tensor.contiguous().cpu(), owner)
                yield answer
            else:
                yield self._receive(owner, *outline)

    def _do(self, jobs: Sequence[Job], weights: torch.Tensor) -> tuple[list[Any], Exception | None]:
        """The answers to this rank's jobs, up to the first that fails."""
        answers = []
        try:
            for answer in self._own.run(jobs, weights):
                answers.append(answer)
        except Exception as error:
            return answers, error
        return answers, None

    def _receive(self, owner: int, pickled: bytes, layouts: Sequence[Layout]) -> Any:
        tensors = []
        for shape, dtype, on_cpu in layouts:
            tensor = torch.empty(shape, dtype=dtype)
            self._group.broadcast_tensor(tensor, owner)
            tensors.append(tensor if on_cpu else tensor.to(self._device))
        return Packed(pickled, tensors).unpack()

    def close(self) -> None:
        """End this rank's own executor. The group stays: others may have something to say still."""
        self._own.close()


Layout = tuple[torch.Size, "torch.dtype", bool]
"""Shape and dtype of a tensor, and whether it lies on the CPU."""


class Packed:
    """A value pickled without its tensors, which travel beside it and are copied only by their transport."""

    def __init__(self, pickled: bytes, tensors: Sequence[torch.Tensor]) -> None:
        self.pickled, self.tensors = pickled, tensors

    @classmethod
    def of(cls, value: Any) -> Packed:
        buffer = io.BytesIO()
        pickler = _Outline(buffer)
        pickler.dump(value)
        return cls(buffer.getvalue(), pickler.tensors)

    @property
    def layouts(self) -> list[Layout]:
        return [(tensor.shape, tensor.dtype, tensor.device.type == "cpu") for tensor in self.tensors]

    def unpack(self) -> Any:
        reader = pickle.Unpickler(io.BytesIO(self.pickled))
        reader.persistent_load = self.tensors.__getitem__  # type: ignore[method-assign]
        return reader.load()


class _Outline(pickle.Pickler):
    """Writes a tensor's number in place of the tensor; the same tensor twice is the same number."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, item: Any) -> int | None:
        if not isinstance(item, torch.Tensor):
            return None
        if id(item) not in self._numbers:
            self._numbers[id(item)] = len(self.tensors)
            self.tensors.append(item)
        return self._numbers[id(item)]


def share_out(work: Sequence[float], ranks: int) -> list[int]:
    """The rank of each job: the largest jobs first, each to the rank with the least to do so far.

    Ties go to the earlier job and the lower rank, so that every rank finds the same.

    >>> share_out([1, 5, 2, 4], ranks=2)
    [0, 0, 1, 1]
    """
    owners = [0] * len(work)
    loads = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(range(len(work)), key=lambda index: (-work[index], index)):
        load, rank = loads[0]
        owners[index] = rank
        heapq.heapreplace(loads, (load + work[index], rank))
    return owners


def _portable(error: Exception | None, rank: int) -> Exception | None:
    """An error that can be told to other ranks, with the place where it was raised."""
    if error is None:
        return None
    if not isinstance(error, UserError):
        error.add_note(f"In rank {rank}:\n{''.join(traceback.format_exception(error))}")
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
