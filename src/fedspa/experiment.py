"""One run, from a checked plan to its summary: build everything, run the rounds, report."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedspa import __version__
from fedspa.config import Plan, build_model
from fedspa.costs import NetworkCosts
from fedspa.data.batches import Pixels
from fedspa.data.clients import ClientRows, client_rows
from fedspa.data.source import Augmentation, ImageData, ImageSet
from fedspa.engine import EagerEngine
from fedspa.errors import UserError
from fedspa.evaluation import Evaluator, spread
from fedspa.executor import Executor, InProcess, Workers, can_fork, usable_cores
from fedspa.federation import FederatedLoop
from fedspa.link import Link
from fedspa.masks.initial import InitialMasks
from fedspa.masks.packed import PackedMask
from fedspa.methods.base import Origin, Visit
from fedspa.models.initialise import seeded
from fedspa.partition.base import label_counts, partition_hash
from fedspa.records import ClientRow, RunInfo, RunResult
from fedspa.summary import ACCURACY, History
from fedspa.theory import TheoremCurves
from fedspa.tracking.console import ConsoleView
from fedspa.tracking.fanout import Trackers
from fedspa.tracking.run_folder import RunFolder
from fedspa.visitor import Call, Visitor
from fedspa.weights import ParameterSpace


def run(plan: Plan, folder: Path) -> dict[str, Any]:
    """Run what the plan says, leave the results in `folder`, and return the summary.

    Raises `UserError` where the data or the network shows that the plan cannot work; that is before training
    starts and before any tracker has begun. A run that ends early is told so to its trackers: FAILED, or
    KILLED after Ctrl-C.
    """
    begin = time.perf_counter()
    federation = build(plan)
    info = describe(plan, federation, folder)
    trackers = Trackers([RunFolder(), ConsoleView(), *plan.loggers.values()])
    try:
        trackers.start(info)
        history = History(plan.settings.eval.targets, plan.settings.eval.final_rounds)
        for record in federation.loop.rounds():
            history.add(record)
            trackers.round(record)
        scores = {kind: by_metric[ACCURACY] for kind, by_metric in federation.loop.state.scores.items()}
        finetuned = None
        if plan.settings.finetune.epochs and "global" in plan.method.kinds:
            scores["finetuned"] = federation.loop.finetune(plan.settings.finetune.epochs)[ACCURACY]
            finetuned = spread(scores["finetuned"])
        summary = history.summary(info, finetuned, time.perf_counter() - begin)
        trackers.finish(result(federation, scores, summary))
    except KeyboardInterrupt:
        trackers.abort("KILLED", "interrupted")
        raise
    except BaseException as error:
        trackers.abort("FAILED", str(error) or type(error).__name__)
        raise
    finally:
        federation.executor.close()
    return summary


class LocalModel(NamedTuple):
    """Weights at rest: the values of those that are not zero, and where they are."""

    values: torch.Tensor
    held: PackedMask

    @classmethod
    def pack(cls, weights: torch.Tensor) -> LocalModel:
        """Pack weights [total] without loss."""
        return cls(weights[weights != 0].cpu(), PackedMask.pack(weights != 0))


@dataclass(frozen=True)
class Federation:
    """A federation that is ready to run."""

    loop: FederatedLoop
    visitor: Visitor
    executor: Executor
    space: ParameterSpace
    data: ImageData
    rows: ClientRows
    local_models: dict[int, LocalModel]
    """With `save.local`: each visited client's weights after its last visit."""
    curves: TheoremCurves | None
    """With `theory.every`: what is remembered for the curves of Theorem 1."""


def build(plan: Plan) -> Federation:
    """Load the data, deal it to the clients, and put network, engine, evaluator and loop together."""
    settings, source = plan.settings, plan.dataset
    fabric = plan.hardware.fabric()
    shape = (source.channels, source.image_size, source.image_size)
    network = seeded(
        lambda: build_model(plan, source.channels, source.image_size, source.classes), settings.seed
    )
    network = network.to(plan.hardware.dtype)
    costs = NetworkCosts.of(network, shape, settings.costs.convention)

    data = source.load()  # after the network, whose mistakes need no data
    rows = client_rows(data, source, plan.partition, settings.federation.clients, settings.seed)
    _check_batches(plan, rows)

    def pixels(images: ImageSet, augmentation: Augmentation) -> Pixels:
        return Pixels(images, source.mean, source.std, augmentation, fabric.device, plan.hardware.dtype)

    train_pixels = pixels(data.train, source.augmentation)
    engine = EagerEngine(fabric, network, settings.training, train_pixels)
    space = engine.space
    density = 1 - Fraction(str(settings.sparsity))
    active = plan.layer_sparsity.active_counts(space.shapes, density, space.names)
    shared = plan.mask is None or plan.mask.initial == "same"
    origin = Origin(
        weights=engine.weights,
        initial_mask=InitialMasks(space, active, shared=shared, seed=settings.seed),
        full_mask=PackedMask.pack(torch.ones(space.total)),
    )

    def evaluator(images: Pixels, client_rows: list[np.ndarray], prefix: str = "") -> Evaluator:
        metrics = {prefix + name: metric for name, metric in plan.metrics.items()}
        return Evaluator(engine, images, client_rows, metrics, source.classes, settings.eval.batch_size)

    evaluators = [evaluator(pixels(data.test, Augmentation()), rows.test)]
    if source.val_fraction:
        evaluators.append(evaluator(train_pixels, rows.val, "val_"))

    local_models: dict[int, LocalModel] = {}
    curves = TheoremCurves(settings.theory.every) if settings.theory.every else None

    def on_visit(call: Call, weights: torch.Tensor, visit: Visit) -> None:
        if settings.save.local:
            local_models[call.client] = LocalModel.pack(visit.local)
        if curves:
            curves.remember(call, weights, visit)

    visitor = Visitor(
        seed=settings.seed,
        training=settings.training,
        method=plan.method,
        searcher=plan.mask,
        engine=engine,
        network=costs,
        evaluators=evaluators,
        client_rows=rows.train,
        link=Link(space, settings.federation.wire) if settings.federation.wire else None,
    )
    executor = _executor(plan, visitor, origin)
    loop = FederatedLoop(visitor, executor, settings.federation, settings.eval, origin, on_visit)
    return Federation(loop, visitor, executor, space, data, rows, local_models, curves)


def _executor(plan: Plan, visitor: Visitor, origin: Origin) -> Executor:
    """Worker processes where they can help: on the CPU, more cores than one, more clients a round than one."""
    workers = plan.hardware.workers
    if workers is None:
        workers = min(usable_cores(), plan.settings.federation.clients_per_round)
        if origin.weights.device.type != "cpu" or not can_fork():
            workers = 1
    elif workers > 1 and (origin.weights.device.type != "cpu" or not can_fork()):
        raise UserError(
            f"hardware.workers={workers} needs Linux, hardware.accelerator=cpu and hardware.threads=1: "
            "workers are forks of a process that computes on one thread; use hardware.workers=1 here."
        )
    if workers == 1:
        return InProcess(visitor)
    return Workers(visitor, workers, len(origin.weights), origin.weights.dtype)


def _check_batches(plan: Plan, rows: ClientRows) -> None:
    """With `training.drop_last` a client smaller than a batch would never train."""
    sizes = [len(own) for own in rows.train]
    batch = plan.settings.training.batch_size
    if plan.settings.training.drop_last and min(sizes) < batch:
        raise UserError(
            f"training.drop_last=true leaves client {sizes.index(min(sizes))} with its {min(sizes)} training "
            f"images no batch of training.batch_size={batch}: use drop_last=false or a smaller batch."
        )


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
