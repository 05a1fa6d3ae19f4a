"""The processes of one run, as ranks of torch.distributed, and how all of them end together.

Ranks meet in one kind of collective only: `RankGroup.gather`. Between two of them a rank works alone. If it fails
there, or gets a signal, it reports that in the next `gather`, and all ranks raise the same error. A rank that
dies closes its connections, so that the next `gather` of the others fails (`RankLost`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import IO, Any, NamedTuple, TypeVar

import torch

from fedspa.core import transfers
from fedspa.core.errors import UserError, brief
from fedspa.core.launch import Launch, environment_of
from fedspa.core.out_of_memory import ran_out
from fedspa.runs import pickling
from fedspa.runs.interruption import Interruptions
from fedspa.runs.pickling import pack, portable, unpack

PATIENCE = timedelta(minutes=10)
"""The time a rank waits for the others at the start. On a busy disk imports alone take minutes."""
TOGETHER = timedelta(days=2)
"""The time that joined ranks wait for a slow one. A dead one is noticed at once."""
PIECE = 1 << 24
"""The bytes of a file that are sent in one message."""

T = TypeVar("T")


class Failure(NamedTuple):
    """The message of a rank that failed, in place of its item."""

    error: BaseException
    job: int = -1
    """The index of the failed job in its round. Of several failures the first job's is raised, as in one process."""


class RankLost(UserError):
    """Raised if another rank has died."""


class RankGroup:
    """The processes of a run; a run in one process is a group of one.

    All ranks must call `gather`, and the functions that use it, in the same order.
    """

    def __init__(self, rank: int = 0, size: int = 1, interruptions: Interruptions | None = None) -> None:
        """`size` above 1 needs torch.distributed to be initialised with a backend for the CPU."""
        self.rank, self.size = rank, size
        self._interruptions = interruptions or Interruptions()
        self._agreed: BaseException | None = None
        self._lost = False

    @property
    def main(self) -> bool:
        """True for the rank that writes files, tracks the run and prints."""
        return self.rank == 0

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """A context for this rank's work without collectives. A signal ends it at any point."""
        with self._interruptions.allowed():
            yield

    @contextmanager
    def synchronised(self, *, interruptible: bool = False) -> Iterator[None]:
        """A context: if one rank raises an error in the block, all ranks raise it by the end of the block.

        `interruptible`: a signal to one rank ends the block on all. A group of one stops at once; in a larger
        group each rank stops only `droppable` work.
        """
        error: BaseException | None = None
        try:
            with self.droppable() if interruptible and self.size == 1 else nullcontext():
                yield
        except BaseException as raised:
            if raised is self._agreed or self._lost:
                raise
            error = raised
        if error is None and interruptible:
            error = self._interruptions.pending
        self.gather(None, Failure(error) if error else None)

    def gather(self, item: T, failure: Failure | None = None) -> list[T]:
        """The item of each rank, by rank. If a rank has a failure, all ranks raise its error.

        An error is raised before a signal. A rank without memory for its own tensors has a failure. Without memory for
        those of others it raises the error alone, and the group ends.
        """
        if self.size == 1:
            if failure:
                self._agreed = failure.error
                raise failure.error
            return [item]
        word = failure and failure._replace(error=portable(failure.error, f"rank {self.rank}"))
        apart: list[torch.Tensor] = []
        packed = pack((item, word), apart)
        try:
            own = transfers.joined(apart) if apart else torch.empty(0)  # before others wait for it
        except RuntimeError as error:
            return self.gather(None, failure or Failure(error))  # type: ignore[arg-type]
        words: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(words, (packed, [(t.dtype, t.shape) for t in apart]))
            tensors = [self._sent(own, kinds, rank) for rank, (_, kinds) in enumerate(words)]
        except RuntimeError as error:
            self._lost = True
            if ran_out(error):
                raise
            raise RankLost(
                "Another process of this run ended early (killed, out of memory, or its machine is gone), so that "
                "the run cannot go on; the same command with resume=auto goes on from its last checkpoint."
            ) from error
        # A rank's own item is not copied.
        all_words = [
            (item, word) if rank == self.rank else unpack(packed, tensors[rank])
            for rank, (packed, _) in enumerate(words)
        ]
        if failures := [(failed, rank) for rank, (_, failed) in enumerate(all_words) if failed]:
            failed, rank = min(failures, key=_precedence)
            # A rank raises its own error as it is, with its traceback and causes.
            self._agreed = failure.error if failure and rank == self.rank else failed.error
            raise self._agreed
        return [item for item, _ in all_words]

    def _sent(self, own: torch.Tensor, kinds: list[tuple[Any, Any]], source: int) -> list[torch.Tensor]:
        """The tensors of another rank, from its GPU to this rank's. `kinds`: their dtypes and shapes.

        This rank's `own`, in joined bytes, are only sent, and nothing is returned.
        """
        if not kinds:
            return []
        if source == self.rank:
            torch.distributed.broadcast(own, source)
            return []
        like = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in kinds]
        data = torch.empty(sum(each.nbytes for each in like), dtype=torch.uint8, device=pickling.APART)
        torch.distributed.broadcast(data, source)
        return transfers.parted(data, like)

    def broadcast(self, item: T, source: int = 0) -> T:
        """The item of rank `source`."""
        return self.gather(item if self.rank == source else None)[source]  # type: ignore[return-value]

    def from_first(self, ask: Callable[[], T]) -> T:
        """The result of `ask` on the first rank, which alone calls it. If it raises an error, all ranks do."""
        item, failure = None, None
        try:
            if self.main:
                with self.droppable():
                    item = ask()
        except BaseException as error:
            failure = Failure(error)
        return self.gather(item, failure)[0]  # type: ignore[return-value]

    def wait(self) -> None:
        """Wait until all ranks have called this, or one of them is gone."""
        if not self._lost:
            with suppress(RankLost):
                self.gather(None)


def _precedence(failure: tuple[Failure, int]) -> tuple[bool, int, int]:
    (error, job), rank = failure
    return not isinstance(error, Exception), job, rank


@contextmanager
def joined(launch: Launch) -> Iterator[RankGroup]:
    """The processes of a run as a group that handles signals. A single process is a group of one.

    Raises `UserError` on every waiting rank if another one does not come within `PATIENCE`.
    """
    with Interruptions() as interruptions:
        group = RankGroup(launch.rank, launch.size, interruptions)
        if launch.size == 1:
            yield group
            return
        with group.droppable():
            store = _beside_signals(lambda: _meet(launch))
            torch.distributed.init_process_group(
                _backends(), store=store, rank=launch.rank, world_size=launch.size, timeout=TOGETHER
            )
        try:
            yield group
        finally:
            torch.distributed.destroy_process_group()


def _backends() -> str:
    """The backends of torch.distributed: gloo between CPUs, and NCCL between GPUs if there are any."""
    with_gpus = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if with_gpus else "gloo"


def _meet(launch: Launch) -> torch.distributed.Store:
    """Wait until all ranks have written their names into the store of torchrun, or of the first rank."""
    environment = environment_of(launch)
    place = f"{environment.main_address}:{environment.main_port}"  # Lightning puts both into os.environ
    try:
        found = torch.distributed.rendezvous("env://", launch.rank, launch.size, timeout=PATIENCE)
        store: torch.distributed.Store = next(found)[0]
        store.set(f"rank {launch.rank}", "here")
        store.wait([f"rank {rank}" for rank in range(launch.size)], PATIENCE)
    except RuntimeError as error:
        raise UserError(
            f"Rank {launch.rank} of {launch.size} did not find all others at {place} within "
            f"{PATIENCE.total_seconds() / 60:g} minutes ({brief(error)}): see what the missing ones say."
        ) from error
    return store


def _beside_signals(work: Callable[[], T]) -> T:
    """Run work in a thread that signals cannot interrupt. A signal then interrupts the waiting."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done.result()


@contextmanager
def on_every_rank(path: Path | None, group: RankGroup) -> Iterator[Path | None]:
    """A file of the first rank on all ranks; None if there is no file.

    The ranks may share no disk: the others get a copy in the folder for temporary files (TMPDIR). `path`: the first
    rank's path.
    """
    if not group.broadcast(path is not None):
        yield None
        return
    with group.synchronised():
        file: IO[bytes] = path.open("rb") if path else tempfile.NamedTemporaryFile()  # noqa: SIM115
    with file:
        if group.size > 1:
            with group.synchronised():
                while piece := group.broadcast(file.read(PIECE) if group.main else b""):
                    if not group.main:
                        file.write(piece)
            file.flush()
        yield Path(file.name)
