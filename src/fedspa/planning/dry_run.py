"""What runs will cost and how long they will take here, told without running them.

FLOPs and traffic are those of `python src/costs.py`. Times are the FLOPs that this machine has to compute, over
the speed at which it just trained the network on noise. Masks cost no less to compute than dense weights do in
this simulation, so these FLOPs are dense ones; testing the models counts with its forward passes. Of a network whose
FLOPs cannot be counted, no time is told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from fedspa.config.network import build_model
from fedspa.config.plan import Plan
from fedspa.core.launch import usable_cores
from fedspa.core.records import Costs
from fedspa.costs.network import TRAINING_FACTOR
from fedspa.costs.units import show_bytes, show_flops, show_time
from fedspa.data.batches import Pixels
from fedspa.data.image_set import ImageSet
from fedspa.planning.cost_report import CostReport
from fedspa.runs.workload import workload
from fedspa.training.base import LocalTask
from fedspa.training.eager import EagerEngine

PROBE_SECONDS = 2.0
SPEED_DEPENDS_ON = ("model", "dataset", "training", "hardware", "engine", "federation")


@dataclass(frozen=True)
class Estimate:
    """What one run costs, in the federation's terms and in this machine's."""

    costs: Costs
    executed_flops: int | None
    speed: float | None
    """FLOP/s of all its workers together."""
    remark: str
    """Why FLOPs are not known; "" where they are."""

    @property
    def seconds(self) -> float | None:
        return None if self.executed_flops is None or self.speed is None else self.executed_flops / self.speed


def listing(plans: Mapping[str, Plan], finished: Collection[str] = ()) -> str:
    """A table of runs by name: FLOPs, traffic, time. Those that are finished take no time any more."""
    estimates = _estimates(plans)
    width = max(map(len, plans))
    lines = [f"{'':<{width}}  {'FLOPs':>9}  {'traffic':>9}  {'time':>8}"]
    for name, estimate in estimates.items():
        seconds = "finished" if name in finished else show_time(estimate.seconds)
        lines.append(_line(f"{name:<{width}}", estimate.costs, seconds))
    total = sum((estimate.costs for estimate in estimates.values()), Costs())
    times = [estimate.seconds for name, estimate in estimates.items() if name not in finished]
    left = None if None in times else sum(time or 0 for time in times)
    speeds = {plans[name].names["model"]: estimate.speed for name, estimate in estimates.items()}
    measured = [f"{model} {show_flops(speed)} FLOP/s" for model, speed in speeds.items() if speed is not None]
    of_time = [
        "Time: dense FLOPs of training, mask search and tests, one run after another, at the speed measured here",
        f"just now: {', '.join(measured)}.",
    ]
    return "\n".join(
        [
            *lines,
            _line(f"{f'all {len(plans)}':<{width}}", total, show_time(left)),
            "",
            *(of_time if measured else []),
            "Costs: of the rounds, for clients of equal size; Sub-FedAvg's before it prunes.",
            *sorted({f"{estimate.remark}." for estimate in estimates.values() if estimate.remark}),
        ]
    )


def _line(name: str, costs: Costs, time: str) -> str:
    return f"{name}  {show_flops(costs.flops):>9}  {show_bytes(costs.traffic_bytes):>9}  {time:>8}"


def _estimates(plans: Mapping[str, Plan]) -> dict[str, Estimate]:
    """Runs that differ in nothing that matters to costs share an estimate, and a network its measured speed."""
    estimates: dict[str, tuple[Costs, int | None, str]] = {}
    speeds: dict[str, float | None] = {}
    found = {}
    for name, plan in plans.items():
        same_costs = _key(plan.resolved | {"seed": 0, "name": "", "partition": {}, "loggers": {}})
        if same_costs not in estimates:
            report = CostReport.of(plan)
            estimates[same_costs] = report.total, _executed_flops(report), report.network.remark
        same_speed = _key({part: plan.resolved[part] for part in SPEED_DEPENDS_ON})
        if same_speed not in speeds:
            speeds[same_speed] = _speed(plan)
        costs, executed, remark = estimates[same_costs]
        found[name] = Estimate(costs, executed, speeds[same_speed], remark)
    return found


def _key(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def _executed_flops(report: CostReport) -> int | None:
    """What the machine computes: dense products wherever the federation pays for sparse ones, and the tests."""
    plan, network, total = report.plan, report.network, report.total
    settings, forward, sparse = plan.settings, network.forward_flops(), network.forward_flops(report.active)
    if forward is None or sparse is None or total.train_flops is None or total.search_flops is None:
        return None
    training = total.train_flops * forward // sparse
    rounds_tested = ceil(settings.federation.rounds / settings.eval.every)
    tests = (
        rounds_tested
        * min(settings.federation.clients, settings.eval.clients or settings.federation.clients)
        * len({"global", "personal"}.intersection(plan.method.kinds))
    )
    if "local" in plan.method.kinds:
        tests += report.visits.total()
    testing = tests * plan.dataset.client_test_images * forward
    return training + total.search_flops + testing + (report.finetune_flops or 0)


def _speed(plan: Plan) -> float | None:
    """FLOP/s of dense local training on this machine, measured: the engine that the run will take, on batches of
    noise. Compiling comes before, and is not counted."""
    source, training = plan.dataset, plan.settings.training
    report, fabric = CostReport.of(plan), plan.hardware.fabric()
    forward = report.network.forward_flops()
    if forward is None:
        return None
    network = build_model(plan, source.channels, source.image_size, source.classes).to(plan.hardware.dtype)
    shape = (source.channels, source.image_size, source.image_size)
    images = torch.randint(256, (training.batch_size, *shape), dtype=torch.uint8)
    noise = ImageSet(images, torch.zeros(training.batch_size, dtype=torch.int64))
    pixels = Pixels(noise, source.mean, source.std, source.augmentation, fabric.device, plan.hardware.dtype)
    asked = workload(plan, report.client_sizes, source.client_test_images)
    engine = plan.engine.build(EagerEngine(fabric, network, training, pixels), asked)

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
