"""Builds a federation from a checked plan: data, network, engine, evaluators, workers, loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import nn

from fedspa.communication.link import Link
from fedspa.config.network import build_model
from fedspa.config.plan import Plan
from fedspa.core.client import Initial
from fedspa.core.errors import UserError
from fedspa.core.launch import ALONE, Launch, usable_cores
from fedspa.core.packed_mask import PackedMask
from fedspa.core.records import VALIDATION
from fedspa.core.weights import ParameterSpace
from fedspa.costs.network import NetworkCosts
from fedspa.data.examples import Examples
from fedspa.data.sets import Data
from fedspa.federated.client_runner import ClientRunner
from fedspa.federated.client_setup import ClientSetup
from fedspa.federated.evaluation import Evaluator
from fedspa.federated.executor import Executor, InProcess
from fedspa.federated.loop import FederatedLoop
from fedspa.federated.messages import Messages
from fedspa.federated.own_layers import OwnLayers
from fedspa.federated.theory import TheoremCurves
from fedspa.masks.initial import InitialMasks
from fedspa.models.checking import single_example_fault
from fedspa.models.initialise import seeded
from fedspa.partition.clients import ClientRows, client_rows, row_counts
from fedspa.runs.first_mask_check import SEEN, check_flow
from fedspa.runs.fitting import check_fits
from fedspa.runs.memory import keep_freed_memory
from fedspa.runs.rank_group import RankGroup
from fedspa.runs.ranks import Ranks
from fedspa.runs.workers import Workers, can_fork
from fedspa.runs.workload import workload
from fedspa.training.eager import EagerEngine
from fedspa.training.narrow import NarrowEngine


@dataclass(frozen=True)
class Federation:
    """A federation that is ready to run."""

    loop: FederatedLoop
    runner: ClientRunner
    executor: Executor
    group: RankGroup
    """The processes that run the federation together."""
    space: ParameterSpace
    data: Data
    rows: ClientRows
    curves: TheoremCurves | None
    """With `theory.every`: the recorded rounds for the curves of Theorem 1."""

    def state_dict(self) -> dict[str, Any]:
        """The state of all parts that change from round to round."""
        return {name: part.state_dict() for name, part in self._parts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict` from another process."""
        for name, part in self._parts():
            part.load_state_dict(state[name])

    def _parts(self) -> Iterator[tuple[str, Any]]:
        named = {"loop": self.loop, "curves": self.curves}
        return ((name, part) for name, part in named.items() if part)


def build(plan: Plan, launch: Launch = ALONE, group: RankGroup | None = None) -> Federation:
    """Load the data, divide it among the clients, and build network, engine, evaluators and loop.

    Every rank of a launch calls it. An error of one rank is raised on all. `group`: the joined ranks.
    """
    group = group or RankGroup()
    with group.synchronised(interruptible=True), group.droppable():
        fabric = plan.hardware.fabric(launch)
        check_fits(
            plan.dataset, fabric.device, launch.local_size
        )  # all ranks check before any of them reads data
    kinds = group.gather(fabric.device.type)
    if len(set(kinds)) > 1:
        raise UserError(
            f"hardware.accelerator={plan.hardware.accelerator} finds different devices on the ranks ("
            f"{', '.join(f'rank {rank}: {kind}' for rank, kind in enumerate(kinds))}): use hardware=gpu or cpu."
        )
    with group.synchronised(interruptible=True), group.droppable():
        return _assemble(plan, fabric, launch, group)


def _assemble(plan: Plan, fabric: Fabric, launch: Launch, group: RankGroup) -> Federation:
    settings, source = plan.settings, plan.dataset
    network = seeded(lambda: build_model(plan), settings.seed).to(plan.hardware.dtype)
    costs = NetworkCosts.of(network, source.input_shape, settings.costs.convention, source.input_dtype)
    if settings.theory.every and ParameterSpace.of(network).kept:
        raise UserError(
            f"theory.every={settings.theory.every} is about weights that clients share, but with personal_layers "
            "they keep layers to themselves: set theory.every=0 or personal_layers=none."
        )

    active = plan.active_counts(ParameterSpace.of(network).shared)
    data = source.load()  # after the network, whose mistakes need no data
    rows = client_rows(data, source, plan.partition, settings.federation.clients, settings.seed)
    _check_batches(plan, rows, network)

    place = (fabric.device, plan.hardware.dtype)
    train_examples = source.examples(data.train, *place, augmented=True)
    parts = fabric, network, settings.training, train_examples, plan.method.training_module
    narrow = plan.mask is not None and plan.mask.cuts_channels and settings.sparsity
    eager = NarrowEngine(*parts, widths=plan.mask.widths) if narrow else EagerEngine(*parts)
    most_tested = int(row_counts(rows.test).max())
    engine = plan.engine.build(eager, workload(plan, row_counts(rows.train), most_tested))
    space, whole = engine.space.shared, engine.weights
    own_layers = OwnLayers(whole[space.total :].clone(), plan.method.trains_personal)
    full_mask = PackedMask.pack(torch.ones(space.total))
    initial_mask: Callable[[int], PackedMask] = lambda client: full_mask  # noqa: E731
    if active and not plan.mask.searches_first:
        initial_mask = InitialMasks.of(plan.mask, space, settings.seed)
        if fabric.device.type != "cpu":  # which would wait for one client's mask after another
            initial_mask.draw_ahead(settings.federation.clients)
        check_flow(plan, eager, initial_mask(0), torch.from_numpy(rows.train[0][:SEEN]))
    public = (len(rows.public), source.outputs)
    initial = Initial(whole[: space.total].clone(), initial_mask, full_mask, public)

    def evaluator(examples: Examples, client_rows: Sequence[np.ndarray], prefix: str = "") -> Evaluator:
        metrics = {prefix + name: metric for name, metric in plan.metrics.items()}
        return Evaluator(examples, client_rows, metrics, source.classes, settings.eval.batch_size)

    evaluators = [evaluator(source.examples(data.test, *place), rows.test)]
    if source.val_fraction:
        evaluators.append(evaluator(train_examples, rows.val, VALIDATION))

    curves = None
    if settings.theory.every:
        # A personal model is the start of its client's next training.
        curves = TheoremCurves(settings.theory.every, plan.method.personal)
    mask = plan.method.normaliser == "holders" or bool(curves and plan.mask.searches_first)
    used = {"mask": mask, "local": bool(settings.save.local or curves)}
    link = Link(space, settings.federation.wire, settings.seed) if settings.federation.wire else None
    setup = ClientSetup(
        seed=settings.seed,
        training=settings.training,
        engine=engine,
        network=costs,
        client_rows=rows.train,
        initial=initial.weights,
        public=torch.from_numpy(rows.public),
        own_layers=own_layers,
    )
    runner = ClientRunner(
        setup=setup,
        method=plan.method,
        evaluators=evaluators,
        messages=Messages(costs, settings.seed, link),
        faults=settings.faults,
        unused=[name for name in used if not used[name]],
    )
    executor = _executor(plan, runner, initial, launch)
    if group.size > 1:
        executor = Ranks(executor, group, runner.work)
    memory = plan.hardware.state_memory_gb * 1e9
    loop = FederatedLoop(
        runner,
        executor,
        settings.federation,
        settings.eval,
        initial,
        on_update=curves.remember if curves else None,
        state_memory=memory,
        save_local=settings.save.local,
    )
    return Federation(loop, runner, executor, group, space, data, rows, curves)


def _executor(plan: Plan, runner: ClientRunner, initial: Initial, launch: Launch) -> Executor:
    """Worker processes if they can help: on a CPU with several cores, and with several clients in a round."""
    workers, engine = plan.hardware.workers, runner.setup.engine
    on_cpu = engine.device.type == "cpu"
    if workers is None:
        workers = plan.hardware.cores or launch.share_of(usable_cores())
        if not (on_cpu and engine.forks and can_fork()):
            workers = 1
    elif workers > 1 and not (on_cpu and can_fork()):
        raise UserError(
            f"hardware.workers={workers} needs Linux, hardware.accelerator=cpu and hardware.threads=1: "
            "workers are forks of a process that computes on one thread; use hardware.workers=1 here."
        )
    if workers > 1 and not engine.forks:
        raise UserError(
            f"hardware.workers={workers} shares the clients out, engine={engine.name} keeps them in one "
            "process: use hardware.workers=1 or engine=eager."
        )
    workers = min(workers, plan.settings.federation.clients_per_round)  # more would never have work
    if workers == 1:
        if on_cpu:
            keep_freed_memory()
        return InProcess(runner)
    return Workers(runner, workers, runner.method.server_init(initial))


def _check_batches(plan: Plan, rows: ClientRows, network: nn.Module) -> None:
    """Raise `UserError` if a client would have no batch, or one that the network cannot train on."""
    training, source = plan.settings.training, plan.dataset
    sizes, batch = row_counts(rows.train), training.batch_size
    if training.drop_last and sizes.min() < batch:
        raise UserError(
            f"training.drop_last=true leaves client {sizes.argmin()} with its {sizes.min()} training "
            f"{source.things} no batch of training.batch_size={batch}: use drop_last=false or a smaller batch."
        )
    smallest = np.full_like(sizes, batch) if training.drop_last else (sizes - 1) % batch + 1
    alone = np.flatnonzero(smallest == 1)
    if not len(alone) or not (fault := single_example_fault(network, source)):
        return
    # Prefer a client with a single example: dropping batches does not help it.
    client = alone[sizes[alone].argmin()]
    if batch == 1:
        remedies = ["a larger training.batch_size"]
    elif sizes[client] == 1:
        remedies = [f"clients of more {source.things}"]
    else:
        remedies = ["training.drop_last=true"]
    if ParameterSpace.of(network).statistics:
        remedies.append("model.batchnorm=groupnorm")
    raise UserError(
        f"model={plan.names['model']} cannot train on one example ({fault}), but of the {sizes[client]} training "
        f"{source.things} of client {client} training.batch_size={batch} leaves a batch of one: "
        f"use {' or '.join(remedies)}."
    )
