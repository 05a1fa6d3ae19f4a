"""The facts about a run before its first round, and what a finished run leaves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedspa import __version__
from fedspa.checkpoints.data_there import file_marks
from fedspa.config.plan import Plan
from fedspa.core import names
from fedspa.core.records import KINDS, VALIDATION
from fedspa.core.tracker import ClientTests, RunInfo, RunResult
from fedspa.data.sets import MadeImages
from fedspa.federated.exploration import EXPLORED_SHARES
from fedspa.federated.scores import Kept
from fedspa.partition.base import label_counts, partition_hash
from fedspa.partition.clients import row_counts
from fedspa.runs.assembly import Federation
from fedspa.tracking.client_table import client_table, last_local_models, last_masks, last_states


def describe(plan: Plan, federation: Federation, folder: Path) -> RunInfo:
    """The facts about a run before its first round."""
    settings, source, train = plan.settings, plan.dataset, federation.data.train
    many = settings.federation.clients > settings.save.client_files
    held, counts = federation.rows.held(train), None
    if source.is_regression:
        counts = np.zeros((len(held), 0), np.int64)
    elif not isinstance(train, MadeImages):
        counts = label_counts(train.targets.numpy(), held, source.classes)
    elif not many:
        counts = train.label_counts(source.classes)
    tests = ClientTests.of(row_counts(federation.rows.test), federation.rows.asked)
    metrics = sorted(plan.metrics, key=lambda name: name != plan.main_metric)
    prefixes = ("", VALIDATION) if source.val_fraction else ("",)
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
        classes=source.classes,
        label_counts=counts,
        partition_rows=held,
        kinds=plan.method.kinds,
        metrics=tuple(prefix + name for prefix in prefixes for name in metrics),
        lower_is_better=tuple(
            prefix + name
            for prefix in prefixes
            for name in metrics
            if not plan.metrics[name].higher_is_better
        ),
        in_percent=not source.is_regression,
        extras=(*plan.method.describe(0), *(EXPLORED_SHARES if plan.method.uses_mask else ())),
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
            *filter(
                None,
                [
                    plan.hardware.remark(federation.loop.state.weights.device.type),
                    federation.runner.setup.network.remark,
                ],
            ),
            *source.remarks,
            tests.remark(len(held)),
            *(() if isinstance(train, MadeImages) else _unused(federation, held, source.things)),
        ),
        many=many,
    )


def _unused(federation: Federation, held: Sequence[np.ndarray], things: str) -> list[str]:
    """A remark if some training examples belong to no client."""
    data, rows = federation.data, [*held]
    if data.test is data.train:  # test rows are held out of one set
        rows += federation.rows.test
    size, used = len(data.train), len(np.unique(np.concatenate(rows)))
    return [f"{size - used:,} of {size:,} training {things} are no client's"] if used < size else []


def result(federation: Federation, kept: Kept, summary: dict[str, Any], *, keep_states: bool) -> RunResult:
    """The clients and tensors of a finished run. `kept`: the clients' last scores."""
    loop, rows, space = federation.loop, federation.rows, federation.space
    scores = {
        names.score(metric, kind): of_clients.dense(len(rows.train))
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
        clients=client_table(loop, rows, scores),
        weights={name: tensor.cpu() for name, tensor in space.items(loop.state.weights)},
        masks=last_masks(loop),
        local_weights=last_local_models(loop),
        client_states=last_states(loop) if keep_states else None,
        theory=theory,
    )
