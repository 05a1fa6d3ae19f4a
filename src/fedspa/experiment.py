"""One run, from a checked plan to its summary: build everything, run the rounds, report."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedspa import __version__
from fedspa.assembly import Federation, build
from fedspa.config import Plan
from fedspa.evaluation import spread
from fedspa.launch import launched
from fedspa.masks.packed import PackedMask
from fedspa.partition.base import label_counts, partition_hash
from fedspa.records import ACCURACY, ClientRow, RunInfo, RunResult
from fedspa.summary import History
from fedspa.tracking.console import ConsoleView
from fedspa.tracking.fanout import Trackers
from fedspa.tracking.run_folder import RunFolder


def run(plan: Plan, folder: Path) -> dict[str, Any]:
    """Run what the plan says, leave the results in `folder`, and return the summary.

    Raises `UserError` where the data or the network shows that the plan cannot work; that is before training
    starts and before any tracker has begun. A run that ends early is told so to its trackers: FAILED, or
    KILLED after Ctrl-C. Under torchrun or SLURM all ranks run this; the first one tracks, into its folder.
    """
    begin = time.perf_counter()
    federation = build(plan, launched())
    group = federation.group
    info = describe(plan, federation, group.broadcast(folder))
    everyone = {"run_folder": RunFolder(), "console_view": ConsoleView(), **plan.loggers}
    trackers = Trackers(everyone if group.main else {})
    try:
        with group.together():
            trackers.start(info)
        history = History(plan.settings.eval.targets, plan.settings.eval.final_rounds)
        for record in federation.loop.rounds():
            history.add(record)
            with group.together():
                trackers.round(record)
        scores = {kind: by_metric[ACCURACY] for kind, by_metric in federation.loop.state.scores.items()}
        finetuned = None
        if plan.settings.finetune.epochs and "global" in plan.method.kinds:
            scores["finetuned"] = federation.loop.finetune(plan.settings.finetune.epochs)[ACCURACY]
            finetuned = spread(scores["finetuned"])
        summary = history.summary(info, finetuned, time.perf_counter() - begin)
        with group.together():
            if group.main:
                trackers.finish(result(federation, scores, summary))
    except KeyboardInterrupt:
        trackers.abort("KILLED", "interrupted")
        raise
    except BaseException as error:
        trackers.abort("FAILED", str(error) or type(error).__name__)
        raise
    finally:
        federation.executor.close()
        group.close()
    return summary


def describe(plan: Plan, federation: Federation, folder: Path) -> RunInfo:
    """What is known before the first round."""
    settings, rows = plan.settings, federation.rows
    held = [np.sort(np.concatenate(parts)) for parts in zip(rows.train, rows.val, strict=True)]
    prefixes = ("", "val_") if plan.dataset.val_fraction else ("",)
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
        label_counts=label_counts(federation.data.train.labels.numpy(), held, plan.dataset.classes),
        partition_rows=held,
        kinds=plan.method.kinds,
        metrics=tuple(prefix + name for prefix in prefixes for name in plan.metrics),
        extras=tuple(plan.mask.describe(0)) if plan.mask else (),
        engine=federation.visitor.engine.name,
        compile_seconds=federation.visitor.engine.compile_seconds,
    )


def result(federation: Federation, scores: dict[str, np.ndarray], summary: dict[str, Any]) -> RunResult:
    """Clients and tensors of a finished run. `scores`: accuracy in percent by kind, NaN where there is none."""
    loop, rows, space = federation.loop, federation.rows, federation.space
    state = loop.state

    def score(kind: str, client: int) -> float | None:
        value = float(scores[kind][client])
        return None if math.isnan(value) else value

    clients = [
        ClientRow(
            client=client,
            train_size=len(rows.train[client]),
            val_size=len(rows.val[client]),
            test_size=len(rows.test[client]),
            visits=state.visits.get(client, 0),
            density=loop.density(client),
            scores={kind: score(kind, client) for kind in scores},
        )
        for client in range(len(rows.train))
    ]
    masks = {client: mask for client, mask in sorted(state.clients.items()) if isinstance(mask, PackedMask)}
    theory = []
    if federation.curves:
        final = [loop.client_state(client) for client in range(len(rows.train))]
        final_masks = [mask for mask in final if isinstance(mask, PackedMask)]
        theory = federation.curves.rows(federation.visitor.engine, rows.train, final_masks)
    return RunResult(
        summary=summary,
        clients=clients,
        weights={name: tensor.cpu() for name, tensor in space.items(state.weights)},
        masks={str(client): mask.bits for client, mask in masks.items()},
        local_weights={
            f"{client}.{part}": tensor
            for client, model in sorted(federation.local_models.items())
            for part, tensor in (("values", model.values), ("mask", model.held.bits))
        },
        theory=theory,
    )
