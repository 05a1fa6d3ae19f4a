"""The paper's three runs on a GPU: some warm rounds of each, extrapolated to the whole, or one run from start to end.

    python benchmarks/gpu_run.py                     # under 8 minutes; then ends by itself
    python benchmarks/gpu_run.py whole               # all 1000 rounds of CIFAR-10 / VGG11, summary as a line
    python benchmarks/gpu_run.py --tiny              # the same code on a CPU, in some minutes; its figures mean nothing

Images are made up (dataset=synthetic) in the number, shape and augmentation of the paper's, so that no file is needed;
`whole` takes any override of `src/train.py`, such as dataset.path=... with dataset=cifar10. Each line is JSON: seconds
of a round and of its phases, their shares, which goals are met, samples a second, seconds of the whole run. Tests of
every kind of model (every 5 rounds), logging and aggregation are in them; `other` is what no phase claims; compiling is
shown apart. A model that fails is a line as well, and makes the exit code 1; the script ends within 9 minutes.

It needs torch, lightning, torchmetrics, pandas, pyarrow, hydra-core and omegaconf, and nothing else.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from hydra import compose, initialize_config_dir

from fedspa.config import plan as config
from fedspa.config.plan import Plan
from fedspa.core.paths import config_dir
from fedspa.runs import assembly, experiment
from fedspa.tracking.fanout import Trackers
from fedspa.tracking.run_folder import RunFolder
from fedspa.training.base import Engine

TIME_LIMIT = 450.0
"""Seconds after which no further measurement is begun."""
END = 540.0
"""Seconds after which the script ends, wherever it hangs."""
WARM_UP = 2
SEARCH_GOAL, EVALUATE_GOAL = 0.06, 0.25
"""Largest share of a round; that of the tests holds with eval.every=1."""
EVAL_EVERY = 5


@dataclass(frozen=True)
class Run:
    """One of the paper's runs."""

    model: str
    classes: int
    channels: int
    image_size: int
    train_size: int
    rounds: int
    goal: float
    """Seconds for the whole run."""

    def overrides(self, tiny: bool) -> list[str]:
        sizes = {"train_size": self.train_size, "test_size": 10_000}
        federation = {"clients": 100, "clients_per_round": 10, "rounds": self.rounds}
        if tiny:
            sizes = {"train_size": 80, "test_size": 800}
            federation = {"clients": 4, "clients_per_round": 2, "rounds": self.rounds}
        augmentation = ["+dataset.augmentation={crop_padding: 4, flip: true}"] if self.channels == 3 else []
        return [
            *("dataset=synthetic", f"model={self.model}", "partition=iid", "mask=dst", "sparsity=0.5"),
            *(f"dataset.{name}={getattr(self, name)}" for name in ("classes", "channels", "image_size")),
            *(f"dataset.{name}={size}" for name, size in sizes.items()),
            *(f"federation.{name}={count}" for name, count in federation.items()),
            *augmentation,
            *(
                f"dataset.client_test_images={10 if tiny else 100}",
                f"training.batch_size={8 if tiny else 128}",
            ),
            *(f"eval.every={EVAL_EVERY}", f"training.epochs={1 if tiny else 5}"),
            *["dataset.least_test_share=0"] * tiny,
        ]


RUNS = {
    "lenet5": Run("lenet5", 26, 1, 28, 124_800, 400, goal=60),
    "vgg11": Run("vgg11", 10, 3, 32, 50_000, 1000, goal=240),
    "resnet18": Run("resnet18", 100, 3, 32, 50_000, 1000, goal=480),
}

CASES = [
    *((model, "auto", 60, []) for model in ("lenet5", "vgg11", "resnet18")),
    *((model, "compiled", 10, ["engine.lanes=1"]) for model in ("lenet5", "vgg11", "resnet18")),
    *((model, "auto", 5, ["eval.every=1"]) for model in ("lenet5", "vgg11", "resnet18")),
    ("lenet5", "eager", 5, []),
    *(("vgg11", "eager", 5, []), ("resnet18", "eager", 5, [])),
    *((model, "compiled", 20, ["hardware.precision=tf32"]) for model in ("vgg11", "resnet18")),
    *((model, "compiled", 20, ["hardware.precision=bf16-mixed"]) for model in ("vgg11", "resnet18")),
    *((model, "compiled", 20, ["hardware.deterministic=false"]) for model in ("vgg11", "resnet18")),
]
"""Model, engine, measured rounds and settings, the most wanted first: the last ones are left out when time is over."""


def plan_of(overrides: list[str]) -> Plan:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return config.check(compose("config", overrides=overrides))


@contextmanager
def tracked(plan: Plan, federation: assembly.Federation) -> Iterator[Trackers]:
    """Whatever a run logs to, in a folder that goes away."""
    with tempfile.TemporaryDirectory() as folder:
        trackers = Trackers([RunFolder()])
        trackers.start(experiment.describe(plan, federation, Path(folder)))
        yield trackers
        trackers.abort("KILLED", "measured")


def measure(run: Run, engine: str, rounds: int, settings: list[str], tiny: bool) -> dict[str, Any]:
    """Some rounds after the first ones, and what they say of the whole run."""
    begin = time.perf_counter()
    aot = tiny and engine == "compiled"
    here = ["engine.compiler=aot_eager"] * aot + ["hardware.workers=1"] * tiny  # workers add up their seconds
    plan = plan_of([*run.overrides(tiny), "logger=none", f"engine={engine}", *settings, *here])
    federation = assembly.build(plan)
    built, engine_used = time.perf_counter() - begin, federation.runner.setup.engine
    records, seconds, logged = [], [], []
    try:
        with tracked(plan, federation) as trackers:
            loop = federation.loop.rounds()
            for _ in range(WARM_UP):
                next(loop)
            for _ in range(rounds):
                begin = time.perf_counter()
                records.append(next(loop))
                made = time.perf_counter()
                trackers.round(records[-1])
                seconds.append(time.perf_counter() - begin)
                logged.append(time.perf_counter() - made)
    finally:
        federation.executor.close()
    mean = fmean(seconds)  # with every fifth round's tests; the median is a round without them
    phases = {phase: fmean(record.seconds[phase] for record in records) for phase in records[0].seconds}
    phases["log"] = fmean(logged)
    phases["other"] = phases["log"] + phases.pop("total") - sum(phases.values())
    share = {phase: value / mean for phase, value in phases.items()}
    met = {"round": mean <= run.goal / run.rounds, "search": share["search"] <= SEARCH_GOAL}
    if "eval.every=1" in settings:
        met["evaluate"] = share["evaluate"] <= EVALUATE_GOAL
    return {
        "model": run.model,
        "engine": engine_used.name,
        "lanes": engine_used.lanes,
        "settings": settings,
        "device": device_name(engine_used),
        "rounds": rounds,
        "round_s": {"mean": round(mean, 4), "median": round(median(seconds), 4)},
        "phase_s": {phase: round(value, 4) for phase, value in phases.items()},
        "share": {phase: round(value, 3) for phase, value in share.items()},
        "goals_met": met,
        "samples_per_s": round(sum(record.samples for record in records) / sum(seconds)),
        "whole_run_s": round(mean * run.rounds, 1),
        "goal_s": run.goal,
        "compile_s": round(engine_used.compile_seconds, 1),
        "set_up_s": round(built - engine_used.compile_seconds, 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if torch.cuda.is_available() else None,
    }


def device_name(engine: Engine) -> str:
    return torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else engine.device.type


def warm_rounds(tiny: bool) -> int:
    """A line for each case, also for one that fails or for which no time is left. Gives how many failed."""
    begin, failures = time.perf_counter(), 0
    for model, engine, rounds, settings in CASES:
        line: dict[str, Any] = {"model": model, "engine": engine, "settings": settings}
        if time.perf_counter() - begin > TIME_LIMIT:
            say(line | {"left_out": "no time left"})
            continue
        try:
            line = measure(RUNS[model], engine, 1 if tiny else rounds, settings, tiny)
        except Exception as error:  # the others are still worth measuring
            line["failed"], failures = f"{type(error).__name__}: {error}", failures + 1
        say(line)
        torch.compiler.reset()  # else it gives up after so many different networks
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return failures


def whole(tiny: bool, overrides: list[str]) -> None:
    """One run of CIFAR-10 as `src/train.py` makes it, by the engine that it chooses, logs included."""
    rounds = ["federation.rounds=3"] if tiny else []
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of([*RUNS["vgg11"].overrides(tiny), "logger=none", *rounds, *overrides])
        summary = experiment.run(plan, Path(folder))
    keys = ("model", "engine", "rounds", "time/total_s", "final/samples_per_s", "final/accuracy/personal")
    say({key: summary[key] for key in keys})


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("warm", "whole"), default="warm")
    parser.add_argument("--tiny", action="store_true", help="a small federation, to try the script itself")
    options, overrides = parser.parse_known_args()
    faulthandler.dump_traceback_later(END, exit=True)
    config.register()
    if options.what == "whole":
        whole(options.tiny, overrides)
    elif failures := warm_rounds(options.tiny):
        sys.exit(f"{failures} of {len(CASES)} measurements failed.")


if __name__ == "__main__":
    main()
