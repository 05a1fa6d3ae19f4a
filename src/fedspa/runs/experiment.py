"""One run, from a checked plan to its summary: build the federation, run the rounds, report."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedspa.checkpoints.archive import ArchiveError, read
from fedspa.checkpoints.checkpoint import Checkpoints
from fedspa.checkpoints.resuming import CHECKPOINTS, last_of_another, occupied
from fedspa.checkpoints.run_state import RunState
from fedspa.config.plan import Plan
from fedspa.core.errors import UserError
from fedspa.core.launch import launched
from fedspa.core.records import RoundRecord, Spread
from fedspa.core.tracker import RunResult, Tracker
from fedspa.federated.evaluation import spreads
from fedspa.federated.scores import Kept
from fedspa.runs.assembly import Federation, build
from fedspa.runs.facts import describe, result
from fedspa.runs.out_of_memory import explains_memory
from fedspa.runs.rank_group import RankGroup, joined, on_every_rank
from fedspa.tracking.console import console_views
from fedspa.tracking.fanout import Trackers
from fedspa.tracking.run_folder import RunFolder
from fedspa.tracking.summary import summarise

log = logging.getLogger(__name__)


def run(plan: Plan, folder: Path, group: RankGroup | None = None, *, quiet: bool = False) -> dict[str, Any]:
    """Run a plan, write the results to `folder`, and return the summary: see `begun`."""
    with begun(plan, folder, group, quiet=quiet) as begun_run:
        for _ in begun_run.rounds():
            pass
        return begun_run.summary


@contextmanager
def begun(
    plan: Plan, folder: Path, group: RankGroup | None = None, *, quiet: bool = False
) -> Iterator[BegunRun]:
    """Begin a run of the plan in `folder` and lock the folder. The caller takes the rounds.

    With `resume` it continues from the newest readable checkpoint in the folder. In a folder without checkpoints it
    begins anew; if none of them can be read, it raises `UserError`.

    Raises `UserError` if the data or the network shows that the plan cannot work. That is before training
    starts and before any tracker has begun. A run that ends early saves its last complete round, and its trackers
    get the status: FAILED, or KILLED after Ctrl-C or a preemption. Under torchrun or SLURM all ranks call this; the
    first one tracks and saves, into its folder. `group`: the ranks, if they have joined already. `quiet`: nothing is
    printed.
    """
    with explains_memory(plan), ExitStack() as stack:
        group = group or stack.enter_context(joined(launched()))
        federation = build(plan, launched(), group)
        stack.callback(federation.executor.close)
        stack.enter_context(explains_memory(plan, federation.runner.setup.engine.lanes))
        folder = group.broadcast(folder)
        with group.synchronised():
            if group.main:
                stack.enter_context(occupied(folder))
        yield BegunRun(plan, federation, folder, {} if quiet else console_views())


class BegunRun:
    """A run in its folder."""

    summary: dict[str, Any]
    """The summary of the finished run. It is set when all `rounds` were taken."""

    def __init__(
        self, plan: Plan, federation: Federation, folder: Path, views: Mapping[str, Tracker]
    ) -> None:
        self._plan, self._federation, self._group = plan, federation, federation.group
        settings = plan.settings
        self._checkpoints = Checkpoints(
            folder / CHECKPOINTS,
            settings.checkpoint.keep if self._group.main else 0,
            settings.checkpoint.every,
        )
        info = describe(plan, federation, folder)
        self._folder = RunFolder(replace=settings.resume is not None)
        everyone = (self._folder, *views.values(), *plan.loggers.values())
        self._trackers = Trackers(everyone if self._group.main else ())
        self._state = RunState(
            plan.resolved, info.data_hash, info.partition_hash, federation, info.lower_is_better
        )
        self._go_on(folder)
        self._info = replace(info, completed=self._state.round, continued=self._state.continued)
        if (continued := self._state.continued) and self._group.main:
            for remark in continued.remarks(info.rounds):
                log.warning("%s.", remark)

    def _go_on(self, folder: Path) -> None:
        """Load the newest checkpoint on every rank. Without one, continue another run or begin anew."""
        file: Path | None = None
        continues: str | None = None
        with self._group.synchronised():
            if self._group.main and self._plan.settings.resume is not None:
                file = self._checkpoints.newest()
                if file is None and (file := last_of_another(self._plan, folder)):
                    continues = str(file.parents[1])
        continues = self._group.broadcast(continues)
        with on_every_rank(file, self._group) as copy, self._group.synchronised():
            if copy is None:
                return
            try:
                state = read(copy)
            except ArchiveError as error:
                raise UserError(
                    f"{file} cannot be read ({error}): begin a new run in another folder."
                ) from error
            self._state.load(state, continues=continues)

    def rounds(self) -> Generator[RoundRecord, None, None]:
        """Run the remaining rounds, one for each item taken, and finish the run after the last one.

        If it is closed earlier, or a round raises an error, it saves the last complete round.
        """
        try:
            with self._group.synchronised():
                self._trackers.start(self._info)
                self._state.completed(self._info.completed)
                self._write()
            for record in self._rounds():
                with self._group.synchronised():
                    self._trackers.round(record)
                    self._state.completed(record.round, record)
                    self._write(only_if_due=True)
                yield record
            with self._group.synchronised():
                self._write()
            with self._group.synchronised(interruptible=True):
                finished = self._conclude()
            with self._group.synchronised():
                if self._group.main:
                    self._trackers.finish(finished)
                    self._checkpoints.finish()
        except BaseException as error:
            self._save_and_abort(error)
            self._group.wait()  # a launcher may kill the other ranks when the first one ends, even while they save
            raise
        self.summary = finished.summary

    def _rounds(self) -> Iterator[RoundRecord]:
        """The remaining rounds. If a rank fails in a round, all ranks fail: a round is complete on all ranks or
        none."""
        rounds = self._federation.loop.rounds()
        while True:
            with self._group.synchronised(interruptible=True):
                record = next(rounds, None)
            if record is None:
                return
            yield record

    def _conclude(self) -> RunResult:
        """Fine-tune after the last round, and collect the results."""
        loop, epochs = self._federation.loop, self._plan.settings.finetune.epochs
        scores: Kept = dict(loop.state.scores)
        finetuned: dict[str, Spread] = {}
        finetune_flops: int | None = 0
        if epochs and "global" in self._plan.method.kinds:
            scores["finetuned"] = loop.tests.finetune(loop.state, epochs)
            weighting = self._plan.settings.eval.weighting
            finetuned = spreads(self._federation.runner.evaluators, scores, weighting)["finetuned"]
            finetune_flops = loop.tests.finetune_flops(epochs)
        densities, items = loop.state.densities(), loop.state.items_kept()
        summary = self._group.from_first(
            lambda: summarise(self._info, finetuned, self._state.seconds, finetune_flops, densities, items)
        )
        keep_states = self._plan.settings.save.personal
        return result(self._federation, scores, summary, keep_states=keep_states)

    def _write(self, *, only_if_due: bool = False) -> None:
        """Write a checkpoint, after the rows of the run's files that belong to it."""
        if not only_if_due or self._checkpoints.due(self._state.round):
            self._folder.sync()
            self._state.write(self._checkpoints)

    def _save_and_abort(self, error: BaseException) -> None:
        """Save the last complete round. A new error is only logged, so that the first error is the one raised."""
        try:
            self._write()
        except Exception as another:
            same = getattr(another, "errno", another) == getattr(error, "errno", error)
            if not same:  # else a full disk would be reported twice
                log.warning("The last complete round could not be saved: %s", another)
        status = "KILLED" if isinstance(error, KeyboardInterrupt | GeneratorExit) else "FAILED"
        self._trackers.abort(status, str(error) or type(error).__name__)
