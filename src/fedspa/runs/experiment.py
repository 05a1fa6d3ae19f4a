"""One run, from a checked plan to its summary: build everything, run the rounds, report."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedspa import __version__
from fedspa.checkpoints.archive import read
from fedspa.checkpoints.checkpoint import Checkpoints
from fedspa.checkpoints.data_there import file_marks
from fedspa.checkpoints.resuming import CHECKPOINTS, occupied
from fedspa.checkpoints.run_state import Part, RunState
from fedspa.config.plan import Plan
from fedspa.core.errors import UserError
from fedspa.core.launch import launched
from fedspa.core.records import (
    KINDS,
    VALIDATION,
    ClientTests,
    RoundRecord,
    RunInfo,
    RunResult,
    Spread,
    Tracker,
)
from fedspa.data.image_set import ImageSet
from fedspa.federated.evaluation import spreads
from fedspa.federated.scores import Kept
from fedspa.partition.base import label_counts, partition_hash
from fedspa.partition.clients import row_counts
from fedspa.runs.assembly import Federation, build
from fedspa.runs.joining import joined
from fedspa.runs.out_of_memory import tells_of_memory
from fedspa.runs.rank_group import RankGroup
from fedspa.runs.shared_file import on_every_rank
from fedspa.tracking.client_table import LastMasks, LastStates, client_arrays, client_rows
from fedspa.tracking.console import console_views
from fedspa.tracking.fanout import Trackers
from fedspa.tracking.run_folder import RunFolder
from fedspa.tracking.summary import History

log = logging.getLogger(__name__)


@tells_of_memory
def run(plan: Plan, folder: Path, group: RankGroup | None = None, *, quiet: bool = False) -> dict[str, Any]:
    """Run what the plan says, leave the results in `folder`, and return the summary.

    With `resume` it goes on from the newest checkpoint in the folder, if one can be read; else it begins anew there.

    Raises `UserError` where the data or the network shows that the plan cannot work; that is before training
    starts and before any tracker has begun. A run that ends early saves its last complete round, and its trackers
    are told: FAILED, or KILLED after Ctrl-C or a preemption. Under torchrun or SLURM all ranks run this; the first
    one tracks and saves, into its folder. `group`: the ranks, where they have joined already. `quiet`: nothing is
    printed.
    """
    with ExitStack() as stack:
        group = group or stack.enter_context(joined(launched()))
        federation = build(plan, launched(), group)
        stack.callback(federation.executor.close)
        folder = group.broadcast(folder)
        with group.synchronised():
            if group.main:
                stack.enter_context(occupied(folder))
        return _Run(plan, federation, folder, {} if quiet else console_views()).run()


class _Run:
    """A run in its folder, which no other run can enter meanwhile."""

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
        everyone = {"run_folder": self._folder, **views, **plan.loggers}
        self._trackers = Trackers(everyone if self._group.main else {})
        self._history = History(settings.eval.targets, settings.eval.final_rounds, info.metrics)
        parts: dict[str, Part] = {
            "federation": federation,
            "history": self._history,
            "trackers": self._trackers,
        }
        self._state = RunState(plan.resolved, info.data_hash, info.partition_hash, parts)
        self._go_on()
        self._info = replace(info, completed=self._state.round)

    def _go_on(self) -> None:
        """Take up the newest checkpoint, on every rank; with none, or without `resume`, the run begins anew."""
        newest = None
        with self._group.synchronised():
            if self._group.main and self._plan.settings.resume is not None:
                newest = self._checkpoints.newest()
        with on_every_rank(newest, self._group) as file, self._group.synchronised():
            if file:
                self._state.load(read(file))
                if self._state.round != (done := self._federation.loop.state.round):
                    raise UserError(
                        f"The checkpoint is whole, but of round {self._state.round} as a run and of round {done} as a "
                        "federation: remove it, and the run goes on from the one before, or begins anew."
                    )

    def run(self) -> dict[str, Any]:
        """All that is left to do."""
        try:
            with self._group.synchronised():
                self._trackers.start(self._info)
                self._state.completed(self._info.completed)
                self._write()
            for record in self._rounds():
                self._history.add(record)
                with self._group.synchronised():
                    self._trackers.round(record)
                    self._state.completed(record.round, record)
                    self._write(only_if_due=True)
            with self._group.synchronised(interruptible=True):
                finished = self._conclude()
            with self._group.synchronised():
                if self._group.main:
                    self._trackers.finish(finished)
                    self._checkpoints.clear()
        except BaseException as error:
            self._save_and_abort(error)
            self._group.wait()  # a launcher whose first rank ends kills the others, perhaps while they save
            raise
        return finished.summary

    def _rounds(self) -> Iterator[RoundRecord]:
        """The rounds that are left. What one rank of them fails at, all fail at: a round is of all or of none."""
        rounds = self._federation.loop.rounds()
        while True:
            with self._group.synchronised(interruptible=True):
                record = next(rounds, None)
            if record is None:
                return
            yield record

    def _conclude(self) -> RunResult:
        """What follows the last round: fine-tuning, and the results."""
        loop, epochs = self._federation.loop, self._plan.settings.finetune.epochs
        scores: Kept = dict(loop.state.scores)
        finetuned: dict[str, Spread] = {}
        finetune_flops: int | None = 0
        if epochs and "global" in self._plan.method.kinds:
            scores["finetuned"] = loop.tests.finetune(loop.state, epochs)
            weighting = self._plan.settings.eval.weighting
            finetuned = spreads(self._federation.runner.evaluators, scores, weighting)["finetuned"]
            finetune_flops = loop.tests.finetune_flops(epochs)
        densities = loop.state.densities()
        summary = self._history.summary(self._info, finetuned, self._state.seconds, finetune_flops, densities)
        keep_states = self._plan.settings.save.personal
        return result(self._federation, scores, summary, many=self._info.many, keep_states=keep_states)

    def _write(self, *, only_if_due: bool = False) -> None:
        """Write a checkpoint, after the rows that it counts on."""
        if not only_if_due or self._state.due(self._checkpoints):
            self._folder.sync()
            self._state.write(self._checkpoints)

    def _save_and_abort(self, error: BaseException) -> None:
        """Of what goes wrong now it is only told, so that the run's own reason to end is not lost."""
        try:
            self._write()
        except Exception as another:
            if getattr(another, "errno", another) != getattr(
                error, "errno", error
            ):  # a full disk is told of once
                log.warning("The last complete round could not be saved: %s", another)
        status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        self._trackers.abort(status, str(error) or type(error).__name__)


def describe(plan: Plan, federation: Federation, folder: Path) -> RunInfo:
    """What is known before the first round."""
    settings, images = plan.settings, federation.data.train
    many = settings.federation.clients > settings.save.client_files
    held, counts = federation.rows.held(images), None
    if isinstance(images, ImageSet):
        counts = label_counts(images.labels.numpy(), held, plan.dataset.classes)
    elif not many:
        counts = images.label_counts(plan.dataset.classes)
    tests = ClientTests.of(row_counts(federation.rows.test), federation.rows.asked)
    prefixes = ("", VALIDATION) if plan.dataset.val_fraction else ("",)
    return RunInfo(
        folder=folder,
        config=plan.resolved,
        names=plan.names,
        sparsity=settings.sparsity,
        seed=settings.seed,
        rounds=settings.federation.rounds,
        config_hash=plan.config_hash,
        partition_hash=partition_hash(held),
        version=__version__,
        classes=plan.dataset.classes,
        label_counts=counts,
        partition_rows=held,
        kinds=plan.method.kinds,
        metrics=tuple(prefix + name for prefix in prefixes for name in plan.metrics),
        extras=tuple(plan.method.describe(0)),
        engine=federation.runner.setup.engine.name,
        engine_instead_of=federation.runner.setup.engine.instead_of,
        compile_seconds=federation.runner.setup.engine.compile_seconds,
        test_rows=federation.rows.test,
        tests=tests,
        client_names=federation.rows.names,
        class_names=federation.data.class_names,
        data_hash=federation.data.hash,
        data_files=file_marks(plan.resolved["dataset"].get("path")),
        remarks=(
            *plan.unused,
            *_other_precision(plan, federation),
            *filter(None, [federation.runner.setup.network.remark]),
            *plan.dataset.remarks,
            tests.told(len(held)),
            *(_unused(held, len(images)) if isinstance(images, ImageSet) else ()),
        ),
        many=many,
    )


def _other_precision(plan: Plan, federation: Federation) -> list[str]:
    """The remark that the device does not compute as was asked for, where it does not."""
    tf32 = plan.hardware.precision == "tf32" and federation.loop.state.weights.device.type != "cuda"
    return ["hardware.precision=tf32 computes as 32-true here: only CUDA has TF32"] if tf32 else []


def _unused(held: Sequence[np.ndarray], images: int) -> list[str]:
    """The remark that some training images are nobody's, where they are."""
    used = sum(map(len, held))
    return [f"{images - used:,} of {images:,} training images are no client's"] if used < images else []


def result(
    federation: Federation,
    kept: Kept,
    summary: dict[str, Any],
    *,
    many: bool,
    keep_states: bool,
) -> RunResult:
    """Clients and tensors of a finished run. `kept`: the clients' last scores."""
    loop, rows, space = federation.loop, federation.rows, federation.space
    scores = {
        f"{kind}_{metric}": of_clients.dense(len(rows.train))
        for kind in KINDS
        for metric, of_clients in kept.get(kind, {}).items()
    }
    theory = []
    if federation.curves:
        theory = federation.curves.rows(
            federation.runner.setup.engine, rows.train, loop.state.mask, loop.tests.clients
        )
    return RunResult(
        summary=summary,
        clients=[] if many else client_rows(loop, rows, scores),
        client_arrays=client_arrays(loop, rows, scores) if many else {},
        weights={name: tensor.cpu() for name, tensor in space.items(loop.state.weights)},
        masks=LastMasks(loop),
        local_weights=federation.local_models.tensors() if federation.local_models else {},
        client_states=LastStates(loop) if keep_states else None,
        theory=theory,
    )
