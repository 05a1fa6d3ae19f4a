"""One run in several processes, the ranks of torch.distributed: on one or many machines, on CPUs or with a GPU each.

Every rank has the whole state of the federation and runs the same loop. Only the clients' jobs are divided:
each rank runs its jobs, all ranks get all results, and each adds them in client order. So all ranks have the same
state. It is the state of a single process, bit for bit if the machines compute alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedspa.core.server import ServerState
from fedspa.federated.executor import Executor
from fedspa.federated.jobs import Job
from fedspa.runs.rank_group import Failure, RankGroup

TOGETHER = 64
"""The largest number of jobs for each rank between two exchanges of results."""


class Ranks:
    """An executor that divides jobs among the ranks of a group. Each rank has an inner executor."""

    def __init__(self, inner: Executor, group: RankGroup, work: Callable[[Job], float]) -> None:
        """
        Args:
            inner: runs this rank's jobs.
            work: the size of a job, in any unit; the same on every rank.
        """
        self._inner, self._group, self._work = inner, group, work

    def run(self, jobs: Sequence[Job], server: ServerState) -> Iterator[Any]:
        """Yield the results of all jobs on every rank. Raises on every rank the exception of the first job to fail."""
        step = TOGETHER * self._group.size
        for first in range(0, len(jobs), step):
            yield from self._exchanged(jobs[first : first + step], server)

    def _exchanged(self, jobs: Sequence[Job], server: ServerState) -> Iterator[Any]:
        owners = share_out([self._work(job) for job in jobs], self._group.size)
        mine = [place for place, owner in enumerate(owners) if owner == self._group.rank]
        done: list[Any] = []
        failure = None
        try:
            with self._group.droppable():
                for result in self._inner.run([jobs[place] for place in mine], server):
                    done.append(result)
        except BaseException as error:
            failure = Failure(error, job=(*mine, len(jobs))[len(done)])
        results = [iter(of_rank) for of_rank in self._group.gather(done, failure)]
        return (next(results[owner]) for owner in owners)

    def close(self) -> None:
        """Close this rank's inner executor. The group stays open."""
        self._inner.close()


def share_out(work: Sequence[float], ranks: int) -> list[int]:
    """The rank of each job: the largest jobs first, each to the rank with the least work so far.

    Ties go to the earlier job and the lower rank, so that every rank computes the same.

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
