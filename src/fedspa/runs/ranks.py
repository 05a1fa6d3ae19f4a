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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fedspa.core.server import ServerState
from fedspa.federated.executor import Executor
from fedspa.federated.jobs import Job
from fedspa.runs.rank_group import Failure, RankGroup


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

    def run(self, jobs: Sequence[Job], server: ServerState) -> Iterator[Any]:
        """The answers to all jobs, on every rank. Raises on every rank what the first job to fail raised.

        Whoever stops taking answers early does so in `RankGroup.synchronised`.
        """
        owners = share_out([self._work(job) for job in jobs], self._group.size)
        mine = [index for index, owner in enumerate(owners) if owner == self._group.rank]
        answers: list[tuple[Packed, Any]] = []
        failure = None
        try:
            with self._group.droppable():
                for answer in self._own.run([jobs[index] for index in mine], server):
                    answers.append((Packed.of(answer), answer))
        except BaseException as error:
            failure = Failure(error, job=(*mine, len(jobs))[len(answers)])
        outlines = self._group.gather([(item.pickled, item.layouts) for item, _ in answers], failure)
        yield from self._group.announced(self._exchange(owners, iter(answers), [iter(o) for o in outlines]))

    def _exchange(
        self,
        owners: Sequence[int],
        answers: Iterator[tuple[Packed, Any]],
        outlines: Sequence[Iterator[tuple[bytes, Sequence[Layout]]]],
    ) -> Iterator[Any]:
        """The answers in the order of the jobs: this rank's own, and by rank the outlines of all."""
        for owner in owners:
            outline = next(outlines[owner])
            if owner == self._group.rank:
                sent, answer = next(answers)
                for tensor in sent.tensors:
                    self._group.broadcast_tensor(tensor.contiguous().cpu(), owner)
                yield answer
            else:
                yield self._receive(owner, *outline)

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
