"""What runs will cost and how long they will take here, told without running them.

FLOPs and traffic are those of `python src/costs.py`. Times are the FLOPs that this machine has to compute, over
the speed at which it just trained the network on noise. Masks cost no less to compute than dense weights do in
this simulation, so these FLOPs are dense ones; testing the models counts with its forward passes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from fedspa.config import Plan
from fedspa.costing.cost_report import CostReport
from fedspa.costing.costs import TRAINING_FACTOR
from fedspa.costing.units import show_bytes, show_flops, show_time
from fedspa.data.batches import Pixels
from fedspa.data.source import ImageSet
from fedspa.engines.eager import EagerEngine
from fedspa.models.building import build_model
from fedspa.records import Costs
from fedspa.rounds.requests import Train, Trained
from fedspa.running.launch import usable_cores
from fedspa.running.workload import workload

PROBE_SECONDS = 2.0
SPEED_DEPENDS_ON = ("model", "dataset", "training", "hardware", "engine", "federation")


@dataclass(frozen=True)
class Estimate:
    """What one run costs, in the federation's terms and in this machine's."""

    costs: Costs
    executed_flops: int
    speed: float
    """FLOP/s of all its workers together."""

    @property
    def seconds(self) -> float:
        return self.executed_flops / self.speed


def listing(plans: Mapping[str, Plan], finished: Collection[str] = ()) -> str:
    """A table of runs by name: FLOPs, traffic, time. Those that are finished take no time any more."""
    estimates = _estimates(plans)
    width = max(map(len, plans))
    lines = [f"{'':<{width}}  {'FLOPs':>9}  {'traffic':>9}  {'time':>8}"]
    for name, estimate in estimates.items():
        seconds = "finished" if name in finished else show_time(estimate.seconds)
        lines.append(_line(f"{name:<{width}}", estimate.costs, seconds))
    total = sum((estimate.costs for estimate in estimates.values()), Costs())
    left = sum(estimate.seconds for name, estimate in estimates.items() if name not in finished)
    speeds = {plans[name].names["model"]: estimate.speed for name, estimate in estimates.items()}
    return "\n".join(
        [
            *lines,
            _line(f"{f'all {len(plans)}':<{width}}", total, show_time(left)),
            "",
            "Time: dense FLOPs of training, mask search and tests, one run after another, at the speed measured here",
            f"just now: {', '.join(f'{model} {show_flops(speed)} FLOP/s' for model, speed in speeds.items())}.",
            "Costs: of the rounds, for clients of equal size; Sub-FedAvg's before it prunes.",
        ]
    )


def _line(name: str, costs: Costs, time: str) -> str:
    return f"{name}  {show_flops(costs.flops):>9}  {show_bytes(costs.traffic_bytes):>9}  {time:>8}"


def _estimates(plans: Mapping[str, Plan]) -> dict[str, Estimate]:
    """Runs that differ in nothing that matters to costs share an estimate, and a network its measured speed."""
    estimates: dict[str, tuple[Costs, int]] = {}
    speeds: dict[str, float] = {}
    found = {}
    for name, plan in plans.items():
        same_costs = _key(plan.resolved | {"seed": 0, "name": "", "partition": {}, "loggers": {}})
        if same_costs not in estimates:
            report = CostReport.of(plan)
            estimates[same_costs] = report.total, _executed_flops(report)
        same_speed = _key({part: plan.resolved[part] for part in SPEED_DEPENDS_ON})
        if same_speed not in speeds:
            speeds[same_speed] = _speed(plan)
        found[name] = Estimate(*estimates[same_costs], speeds[same_speed])
    return found


def _key(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def _executed_flops(report: CostReport) -> int:
    """What the machine computes: dense products wherever the federation pays for sparse ones, and the tests."""
    plan, network = report.plan, report.network
    settings, forward = plan.settings, network.forward_flops()
    training = report.total.train_flops * forward // network.forward_flops(report.active)
    rounds_tested = ceil(settings.federation.rounds / settings.eval.every)
    tests = (
        rounds_tested
        * min(settings.federation.clients, settings.eval.clients or settings.federation.clients)
        * len({"global", "personal"}.intersection(plan.method.kinds))
    )
    if "local" in plan.method.kinds:
        tests += report.visits.total()
    testing = tests * plan.dataset.client_test_images * forward
    return training + report.total.search_flops + testing + report.finetune_flops


def _speed(plan: Plan) -> float:
    """FLOP/s of dense local training on this machine, measured: the engine that the run will take, on batches of
    noise for as many clients as it trains at once. Compiling comes before, and is not counted."""
    source, training = plan.dataset, plan.settings.training
    report, fabric = CostReport.of(plan), plan.hardware.fabric()
    network = build_model(plan, source.channels, source.image_size, source.classes).to(plan.hardware.dtype)
    shape = (source.channels, source.image_size, source.image_size)
    images = torch.randint(256, (training.batch_size, *shape), dtype=torch.uint8)
    noise = ImageSet(images, torch.zeros(training.batch_size, dtype=torch.int64))
    pixels = Pixels(noise, source.mean, source.std, source.augmentation, fabric.device, plan.hardware.dtype)
    asked = workload(plan, report.client_sizes, source.client_test_images, report.network)
    engine = plan.engine.build(EagerEngine(fabric, network, training, pixels), asked)
    visits = plan.settings.federation.clients_per_round
    at_once = min(engine.clients_at_once or visits, visits)

    def train(samples: int) -> int:
        requests = [
            Train(
                weights=engine.weights,
                rows=torch.arange(samples),
                epochs=1,
                learning_rate=training.lr,
                generator=torch.Generator(),
            )
            for _ in range(at_once)
        ]
        return sum(trained.samples for trained in engine.answer(requests) if isinstance(trained, Trained))

    train(training.batch_size)  # the first call is slow
    begin, samples = time.perf_counter(), 0
    while time.perf_counter() - begin < PROBE_SECONDS:
        samples += train(training.batch_size)
    cores = plan.hardware.cores or usable_cores()
    workers = plan.hardware.workers or (cores if fabric.device.type == "cpu" else 1)
    one = TRAINING_FACTOR * report.network.forward_flops() * samples / (time.perf_counter() - begin)
    if engine.clients_at_once != 1:  # such an engine keeps the clients in one process
        return one
    return one * min(workers, visits)
