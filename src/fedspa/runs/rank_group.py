"""The processes of one run, the ranks of torch.distributed, and how they come to one end.

Between two collectives a rank is on its own, and there it may fail, or be asked by a signal to end. It says so at
the next gathering of words, which is the same collective wherever it happens, and all ranks raise what it said:
none is left waiting, and none ends with another reason than the others. Only a rank that dies says nothing; that
closes its connections, so that the next collective of the others fails (`RankLost`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import torch

from fedspa.core.errors import UserError
from fedspa.core.out_of_memory import ran_out
from fedspa.runs.interruption import Interruptions
from fedspa.runs.remote_errors import portable

log = logging.getLogger(__name__)

T = TypeVar("T")


class Failure(NamedTuple):
    """What a rank says instead of what was asked for."""

    error: BaseException
    job: int = -1
    """Which of the jobs of a round failed; of several failures the first job's counts, as in one process."""


class RankLost(UserError):
    """Another rank is gone without a word."""


class RankGroup:
    """The processes of a run; a run in one process is a group of one, which has nobody to talk to.

    The others' words travel by collectives on the CPU (gloo), which every rank must enter in the same order.
    """

    def __init__(self, rank: int = 0, size: int = 1, interruptions: Interruptions | None = None) -> None:
        """`size` above 1 needs torch.distributed to be initialised with a backend for the CPU."""
        self.rank, self.size = rank, size
        self._interruptions = interruptions or Interruptions()
        self._announced: Iterator[Any] = iter(())
        self._in_step = True
        """Whether this rank enters the same collectives as the others."""
        self._agreed: BaseException | None = None

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes files, tracks and speaks."""
        return self.rank == 0

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """This rank's own work, without collectives: a signal drops it at any point."""
        with self._interruptions.allowed():
            yield

    @contextmanager
    def synchronised(self, *, interruptible: bool = False) -> Iterator[None]:
        """What one rank raises in here, all ranks raise by its end.

        `interruptible`: a signal to one of them ends it on all. A group of one drops what it does at once; of
        several, each drops only work that is `droppable`.
        """
        error: BaseException | None = None
        try:
            with self.droppable() if interruptible and self.size == 1 else nullcontext():
                yield
        except BaseException as raised:
            if raised is self._agreed or isinstance(raised, RankLost):
                raise
            error = raised
        if error is None and interruptible:
            error = self._interruptions.pending
        if error is not None:
            self._take_part_in_the_rest(error)
        self.gather(None, None if error is None else Failure(error))

    def gather(self, item: T, failure: Failure | None = None) -> list[T]:
        """What each rank has, by rank; where one has a failure instead, all ranks raise that.

        Small things: they are pickled. Of several failures an error goes before a signal.
        """
        if self.size == 1:
            if failure:
                self._agreed = failure.error
                raise failure.error
            return [item]
        word = failure and failure._replace(error=portable(failure.error, f"rank {self.rank}"))
        words: list[Any] = [None] * self.size
        with self._collective():
            torch.distributed.all_gather_object(words, (item, word))
        if failures := [(told, rank) for rank, (_, told) in enumerate(words) if told]:
            told, rank = min(failures, key=_precedence)
            # One's own is raised as it is, with its traceback and causes.
            self._agreed = failure.error if failure and rank == self.rank else told.error
            raise self._agreed
        return [item for item, _ in words]

    def broadcast(self, item: T, source: int = 0) -> T:
        """What rank `source` has; small, as in `gather`."""
        return self.gather(item if self.rank == source else None)[source]  # type: ignore[return-value]

    def from_first(self, ask: Callable[[], T]) -> T:
        """What the first rank finds, which alone is asked; what it raises, all raise."""
        item, failure = None, None
        try:
            if self.main:
                with self.droppable():
                    item = ask()
        except BaseException as error:
            failure = Failure(error)
        return self.gather(item, failure)[0]  # type: ignore[return-value]

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a contiguous tensor on the CPU, of any dtype, by that of rank `source`."""
        if tensor.numel() and self.size > 1:
            with self._collective():
                torch.distributed.broadcast(tensor.view(-1).view(torch.uint8), source)

    def announced(self, items: Iterable[T]) -> Iterator[T]:
        """Items for each of which all ranks enter the same collectives, whatever becomes of one of them meanwhile."""
        self._announced = items = iter(items)
        while True:
            try:
                item = next(items)
            except StopIteration:
                return
            except BaseException:
                self._in_step = False
                raise
            yield item

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """One that fails means that another process is gone."""
        try:
            yield
        except RuntimeError as error:
            self._in_step = False
            if ran_out(error):
                raise
            raise RankLost(
                "Another process of this run ended early (killed, out of memory, or its machine is gone), so that "
                "the run cannot go on; the same command with resume=auto goes on from its last checkpoint."
            ) from error

    def _take_part_in_the_rest(self, error: BaseException) -> None:
        """Enter what collectives were announced, so that the next one is again the same on all ranks.

        Raises `error` where that cannot be done.
        """
        try:
            for _ in self._announced:
                pass
        except Exception:
            self._in_step = False
        if not self._in_step:
            log.error("Rank %d could not tell the others why it ends: %s", self.rank, error)
            raise error

    def wait(self) -> None:
        """Wait until all ranks have come here, or one of them is gone."""
        if self._in_step:
            with suppress(RankLost):
                self.gather(None)

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _precedence(failure: tuple[Failure, int]) -> tuple[bool, int, int]:
    (error, job), rank = failure
    return not isinstance(error, Exception), job, rank
