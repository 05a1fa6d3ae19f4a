"""Checks of speed for `gpu_check.py`: rounds of the paper's runs on a GPU, against the goals for whole runs."""

from __future__ import annotations

import time
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
from gpu_base import CLIENTS, TINY_CLIENTS, Check, Options, engine_of, made_up, plan, require
from torch.profiler import ProfilerActivity, profile

from fedspa.runs import assembly
from fedspa.runs.assembly import Federation

WARM_UP, EVAL_EVERY = 5, 5
MAY_MISS = 1.1
"""A goal is missed if a run takes more than so many times its seconds, or trains so many times fewer samples."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Goal(NamedTuple):
    """The goals for a whole run on one H100-class GPU."""

    train_size: int
    rounds: int
    seconds: float
    samples_per_s: float
    """In local training."""


GOALS = {
    "lenet5": Goal(124_800, 400, 40, 1_000_000),
    "vgg11": Goal(50_000, 1000, 240, 150_000),
    "resnet18": Goal(50_000, 1000, 480, 60_000),
}


def federation_of(model: str, options: Options, words: tuple[str, ...]) -> Federation:
    """The paper's federation for a model: 100 clients, 10 of them in a round, 5 epochs, tests every 5 rounds."""
    goal, tiny = GOALS[model], options.tiny
    sizes = (80, 200) if tiny else (goal.train_size, 10_000)
    clients, sampled = (TINY_CLIENTS, 2) if tiny else (CLIENTS, 10)
    return assembly.build(
        plan(
            *made_up(model, options, *sizes, augmented=model != "lenet5"),
            *("method=fedspa", "mask=dst", "sparsity=0.5", f"federation.rounds={goal.rounds}"),
            *(f"federation.clients={clients}", f"federation.clients_per_round={sampled}"),
            *(f"dataset.client_test_images={10 if tiny else 100}", f"eval.every={EVAL_EVERY}"),
            *(f"training.batch_size={8 if tiny else 128}", f"training.epochs={1 if tiny else 5}"),
            *words,
        )
    )


def speed(model: str, rounds: int, as_goal: bool, options: Options) -> dict[str, Any]:
    """Measure rounds after the first ones. `as_goal`: with hardware=gpu, which the goals are for; else the defaults."""
    words: tuple[str, ...] = ("engine=auto", f"hardware={'gpu' if as_goal else 'auto'}")
    if options.tiny:
        words = options.compiled("hardware.workers=1")
    federation = federation_of(model, options, words)
    engine, loop = engine_of(federation), federation.loop.rounds()
    require(engine.name == "compiled", "auto fell back to another engine", instead_of=engine.instead_of)
    for _ in range(WARM_UP):
        next(loop)
    begin = time.perf_counter()
    records = [next(loop) for _ in range(rounds)]
    mean = (time.perf_counter() - begin) / rounds
    phases = {
        phase: fmean(record.seconds.get(phase, 0) for record in records) for phase in records[0].seconds
    }
    goal = GOALS[model]
    facts = {
        "device": torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu",
        "lanes": engine.lanes,
        "compile_s": round(engine.compile_seconds, 1),
        "round_s": round(mean, 4),
        "phase_s": {phase: round(value, 4) for phase, value in phases.items()},
        "samples_per_s": round(fmean(record.samples for record in records) / phases["train"]),
        "whole_run_s": round(mean * goal.rounds, 1),
        "goal_s": goal.seconds if as_goal else None,
        "goal_samples_per_s": goal.samples_per_s if as_goal else None,
        **profiled(loop),
    }
    most = MAY_MISS * (1e5 if options.tiny else 1)
    missed = max(facts["whole_run_s"] / goal.seconds, goal.samples_per_s / facts["samples_per_s"])
    require(not as_goal or missed <= most, f"a goal is missed by more than {most:g} x", **facts)
    return facts


def profiled(loop: Any) -> dict[str, Any]:
    """Look at one round: the kernels, their share of the time, the waits of the host, and the slowest kernels."""
    begin = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        record = next(loop)
    seconds = time.perf_counter() - begin
    averages = trace.key_averages()
    kernels = [entry for entry in averages if entry.device_type == torch.autograd.DeviceType.CUDA]
    slowest = sorted(kernels, key=lambda entry: -entry.self_device_time_total)[:8]
    steps = record.samples / 128
    return {
        "kernels_per_step": round(sum(entry.count for entry in kernels) / steps),
        "busy_share": round(sum(entry.self_device_time_total for entry in kernels) / 1e6 / seconds, 3),
        "waits": sum(entry.count for entry in averages if entry.key in WAITS),
        "slowest_us_per_step": {
            entry.key[:60]: round(entry.self_device_time_total / steps, 1) for entry in slowest
        },
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }


CHECKS = [
    *(
        Check("fast", f"{model} with hardware=gpu", 120, partial(speed, model, 10, True))
        for model in ("vgg11", "resnet18", "lenet5")
    ),
    Check("fast", "vgg11 with the defaults", 120, partial(speed, "vgg11", 5, False)),
]
