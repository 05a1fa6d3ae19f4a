"""The costs of runs, and their time on this machine, without running them.

FLOPs and traffic are those of `python src/costs.py`. A time is the number of FLOPs that this machine has to compute,
divided by its measured speed in training the network on noise. In this simulation masks do not save computation, so
these FLOPs are dense ones; tests of the models count with their forward passes. Without FLOPs of a
network there is no time.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping
from math import ceil
from typing import Any

import torch

from fedspa.config.network import build_model
from fedspa.config.plan import Plan
from fedspa.core.launch import usable_cores
from fedspa.core.records import Costs
from fedspa.costs.network import TRAINING_FACTOR
from fedspa.costs.units import show_bytes, show_flops, show_time
from fedspa.planning.cost_report import CostReport
from fedspa.runs.workload import workload
from fedspa.training.base import LocalTask
from fedspa.training.eager import EagerEngine

PROBE_SECONDS = 2.0
SPEED_DEPENDS_ON = ("model", "dataset", "training", "hardware", "engine", "federation")


def listing(plans: Mapping[str, Plan], finished: Collection[str] = ()) -> str:
    """A table of runs by name: FLOPs, traffic, time. Finished runs take no more time.

    Runs with the same costs are counted once, and the speed of a network is measured once.
    """
    reports: dict[str, CostReport] = {}
    speeds: dict[str, float | None] = {}
    width = max(map(len, plans))
    lines = [f"{'':<{width}}  {'FLOPs':>9}  {'traffic':>9}  {'min. time':>9}"]
    total, left, measured = Costs(), [0.0], {}
    for name, plan in plans.items():
        same_costs = _key(plan.resolved | {"seed": 0, "name": "", "partition": {}, "loggers": {}})
        if same_costs not in reports:
            reports[same_costs] = CostReport.of(plan)
        report = reports[same_costs]
        same_speed = _key({part: plan.resolved[part] for part in SPEED_DEPENDS_ON})
        if same_speed not in speeds:
            speeds[same_speed] = _speed(report)
        costs, executed, speed = report.total, _executed_flops(report), speeds[same_speed]
        seconds = None if executed is None or speed is None else executed / speed
        lines.append(_line(f"{name:<{width}}", costs, "finished" if name in finished else show_time(seconds)))
        total += costs
        left += [] if name in finished else [math.nan if seconds is None else seconds]
        if speed is not None:
            measured[plan.names["model"]] = f"{plan.names['model']} {show_flops(speed)} FLOP/s"
    time_left = None if math.isnan(sum(left)) else sum(left)
    if len(plans) > 1:
        lines.append(_line(f"{f'all {len(plans)}':<{width}}", total, show_time(time_left)))
    lines.append("")
    if measured:
        lines += [
            "The time is a lower bound for an idle machine: dense FLOPs of training, mask search and tests, divided by",
            f"the speed measured now: {', '.join(measured.values())}.",
        ]
    remarks = sorted({f"{report.network.remark}." for report in reports.values() if report.network.remark})
    dense = sorted({plan.method.name for plan in plans.values() if plan.method.starts_dense})
    lines.append("Costs: those of the rounds, if all clients have the same size.")
    lines += [
        f"method={name} starts with all weights and sends fewer later on: it will cost less."
        for name in dense
    ]
    return "\n".join([*lines, *remarks])


def _line(name: str, costs: Costs, time: str) -> str:
    return f"{name}  {show_flops(costs.flops):>9}  {show_bytes(costs.traffic_bytes):>9}  {time:>9}"


def _key(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def _executed_flops(report: CostReport) -> int | None:
    """The FLOPs that the machine computes: dense products even for sparse models, and the tests."""
    plan, network, total = report.plan, report.network, report.total
    settings, forward = plan.settings, network.forward_flops()
    training = (report.dense_total if plan.method.uses_mask else total).train_flops
    if forward is None or training is None or total.search_flops is None:
        return None
    rounds_tested = ceil(settings.federation.rounds / settings.eval.every)
    tests = (
        rounds_tested
        * min(settings.federation.clients, settings.eval.clients or settings.federation.clients)
        * len({"global", "personal"}.intersection(plan.method.kinds))
    )
    if "local" in plan.method.kinds:
        tests += report.updates.total()
    testing = tests * plan.dataset.client_test_images * forward
    return training + total.search_flops + testing + (report.finetune_flops or 0)


def _speed(report: CostReport) -> float | None:
    """The measured speed of dense local training on this machine in FLOP/s; None if FLOPs cannot be counted.

    The run's engine trains on batches of noise. Compiling is not part of the time.
    """
    plan, forward = report.plan, report.network.forward_flops()
    source, training, fabric = plan.dataset, plan.settings.training, plan.hardware.fabric()
    if forward is None:
        return None
    network = build_model(plan).to(plan.hardware.dtype)
    noise = source.probe(training.batch_size)
    examples = source.examples(noise, fabric.device, plan.hardware.dtype, augmented=True)
    asked = workload(plan, report.client_sizes, source.client_test_images)
    engine = plan.engine.build(EagerEngine(fabric, network, training, examples), asked)

    def train(samples: int) -> int:
        task = LocalTask(
            weights=engine.weights,
            rows=torch.arange(samples),
            epochs=1,
            learning_rate=training.lr,
            generator=torch.Generator(),
        )
        return engine.train(task).samples

    train(training.batch_size)  # the first call is slow
    begin, samples = time.perf_counter(), 0
    while time.perf_counter() - begin < PROBE_SECONDS:
        samples += train(training.batch_size)
    cores = plan.hardware.cores or usable_cores()
    workers = plan.hardware.workers or (cores if fabric.device.type == "cpu" else 1)
    one = TRAINING_FACTOR * forward * samples / (time.perf_counter() - begin)
    return one * min(workers, plan.settings.federation.clients_per_round) if engine.forks else one
