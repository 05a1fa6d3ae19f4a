"""Checks of values for `gpu_check.py`: the engines on a GPU compute what the eager engine computes on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from gpu_base import Check, Options, engine_of, require, small
from torch import nn
from torch._dynamo.utils import counters

from fedspa.core.client import Proximal, Trained
from fedspa.core.packed_mask import PackedMask
from fedspa.core.randomness import hashed
from fedspa.core.weights import ParameterSpace
from fedspa.masks.select import smallest
from fedspa.runs.assembly import Federation
from fedspa.training.base import Engine, LocalTask
from fedspa.training.choice import Compiled
from fedspa.training.eager import EagerEngine
from fedspa.training.workload import Workload

TOLERANCES = {
    "64-true": (1e-8, 1e-9, 0.0),
    "32-true": (0.1, 2e-3, 0.1),
    "tf32": (0.06, 2e-2, 0.1),
    "bf16-mixed": (0.3, 0.2, 0.3),
}
"""By precision: the largest distance of trained weights as a share of their movement, that of a gradient as a share of
its length, and the largest share of predictions that differ. ReLU and pooling decide on rounded values, so distances
grow with the steps.

They are guesses, with a margin over distances on a CPU: LeNet5 4e-15, 0 and 0 in 64-true; 2e-5, 3e-7 and 0 in 32-true;
0.03, 0.05 and 0.05 in bf16-mixed; VGG11 0.15, 0.11 and 0.05 in bf16-mixed; ResNet18 0.027, 1e-6 and 0 in 32-true. tf32
has an eighth of the rounding of bf16. For comparison: without mask, clipping or proximal term LeNet5's weights differ
by 0.8 to 1, and without weight decay by 0.03, which only 64-true shows."""
DETERMINISTIC = ("hardware.deterministic=true", "hardware.precision=32-true")


def tasks(federation: Federation, like: torch.Tensor) -> list[LocalTask]:
    """Local training of each client from weights [total] of its own, under a mask and with a proximal term.

    The tasks have the dtype and the device of `like`. They are the same in every call, but for rounding.
    """
    start, made = federation.loop.state.weights.cpu().double(), []
    for client, rows in enumerate(federation.rows.train):
        draws = torch.Generator().manual_seed(client)
        mask = (torch.rand(len(start), generator=draws) < 0.5).double()
        weights = mask * (start + 0.01 * torch.randn(len(start), generator=draws, dtype=torch.float64))
        weights, mask, anchor = (vector.to(like) for vector in (weights, mask, start))
        made.append(
            LocalTask(
                weights=weights,
                rows=torch.from_numpy(rows),
                epochs=2,
                learning_rate=0.05,
                generator=draws,
                mask=mask,
                proximal=Proximal(anchor, 0.1) if client % 2 else None,
            )
        )
    return made


def trained(engine: Engine, work: Sequence[LocalTask]) -> list[Trained]:
    """The results of tasks that run in the engine's lanes."""
    return engine.in_lanes([partial(engine.train, task) for task in work])


def results(federation: Federation, engine: Engine) -> list[list[torch.Tensor]]:
    """For each client how far training moves its weights, a gradient [total], and predictions, all on the CPU."""
    work, found = tasks(federation, engine.weights), []
    evaluator, rows = federation.runner.evaluators[0], federation.rows.test[0]
    for task, ended in zip(work, trained(engine, work), strict=True):
        gradient = engine.gradient(task.weights, task.rows, torch.Generator().manual_seed(7))
        predicted = evaluator.predict(engine, ended.weights, rows)
        moved = ended.weights.double() - task.weights.double()
        found.append([moved.cpu(), gradient.double().cpu(), predicted.cpu()])
    return found


def agreement(model: str, precision: str, options: Options) -> dict[str, Any]:
    """Compare the engines in a precision with the eager engine in double precision on the CPU."""
    on_cpu = ("hardware=cpu", "hardware.threads=null", "hardware.precision=64-true")
    exact = small(model, options, *on_cpu, "engine=eager", "engine.kernels=torch")
    expected, facts = results(exact, engine_of(exact)), {}
    for name in ("eager", "compiled"):
        words = [*options.compiled(f"hardware.precision={precision}", "hardware.deterministic=true")]
        if name == "eager":
            words = [word for word in words if not word.startswith("engine")] + ["engine=eager"]
        federation = small(model, options, *words)
        require(engine_of(federation).name == name, f"{name} is not the engine")
        pairs = list(zip(results(federation, engine_of(federation)), expected, strict=True))
        distances = [
            max(float((ours[i] - theirs[i]).norm() / theirs[i].norm()) for ours, theirs in pairs)
            for i in range(2)
        ]
        differing = max(float((ours[2] != theirs[2]).double().mean()) for ours, theirs in pairs)
        facts[name] = [float(f"{value:.2g}") for value in (*distances, differing)]
    for name, found in facts.items():
        close = all(value <= most for value, most in zip(found, TOLERANCES[precision], strict=True))
        require(close, f"{name} is further from double precision than {TOLERANCES[precision]}", **facts)
    return facts


def equal(ours: Sequence[Trained], theirs: Sequence[Trained]) -> bool:
    """True if trainings ended with the same bytes."""
    return all(
        torch.equal(one.weights, other.weights) and torch.equal(one.loss, other.loss)
        for one, other in zip(ours, theirs, strict=True)
    )


def repeats(options: Options) -> dict[str, Any]:
    """Replays, and any number of lanes, give the same bytes. Nothing is compiled again, and no graph breaks."""
    ended, compiler = [], ["engine.compiler=aot_eager"] * options.tiny
    for lanes in (1, 3):
        words = options.compiled(*DETERMINISTIC, *compiler, f"engine.lanes={lanes}")
        federation = small("lenet5", options, *words)
        engine = engine_of(federation)
        work, again = (tasks(federation, engine.weights) for _ in range(2))
        ended.append(trained(engine, work))
        known = dict(counters["stats"])
        results(federation, engine)  # other graphs run in the same memory
        require(equal(trained(engine, again), ended[-1]), f"a replay differs with {lanes} lanes")
        require(counters["stats"] == known, "something was compiled after the engine was built")
        require(not counters["graph_break"], "a graph broke", breaks=dict(counters["graph_break"]))
    require(equal(*ended), "three lanes differ from one")
    return {}


def dropout(options: Options) -> dict[str, Any]:
    """A network with dropout has one lane. Its draws depend on the seed alone."""
    words = [word for word in options.compiled(*DETERMINISTIC) if not word.startswith("engine")]
    federation = small("lenet5", options, "engine=eager", *words)
    base = engine_of(federation)
    assert isinstance(base, EagerEngine)
    inputs = base.examples.empty_inputs(1).numel()
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(inputs, 26))
    eager = EagerEngine(base.fabric, model, base.settings, base.examples)
    choice = Compiled(name="compiled", lanes=3, compiler=None if options.tiny else "inductor")
    engine = choice.build(eager, Workload(largest=40, steps=100))
    require(engine.lanes == 1, "it has several lanes", lanes=engine.lanes)

    def end(seed: int) -> torch.Tensor:
        torch.rand(seed, device=engine.device)  # other draws in between
        draws = torch.Generator().manual_seed(seed)
        rows = torch.from_numpy(federation.rows.train[0])
        task = LocalTask(weights=eager.weights, rows=rows, epochs=2, learning_rate=0.1, generator=draws)
        return engine.train(task).weights

    first = end(1)
    require(torch.equal(first, end(1)), "the same seed gives other draws")
    require(not torch.equal(first, end(2)), "another seed gives the same draws")
    return {}


def resume(precision: str, options: Options) -> dict[str, Any]:
    """Two rounds, a checkpoint, and two more rounds leave the bytes of four rounds."""
    words = options.compiled("hardware.deterministic=true", f"hardware.precision={precision}")
    straight, first, second = (small("lenet5", options, *words) for _ in range(3))
    list(straight.loop.rounds())
    rounds = first.loop.rounds()
    next(rounds), next(rounds)
    second.load_state_dict(first.state_dict())
    list(second.loop.rounds())
    one, other = straight.loop.state, second.loop.state
    require(torch.equal(one.weights, other.weights), "the global weights differ")
    require(all(one.client_state(k) == other.client_state(k) for k in range(4)), "clients' states differ")
    return {}


def selection(options: Options) -> dict[str, Any]:
    """Selection among equal scores, packed masks, counts and draws are those of a CPU."""
    device = torch.device("cpu" if options.tiny else "cuda")
    draws = torch.Generator().manual_seed(0)
    for shape in [(100_003,), (10, 20_001)]:
        scores = torch.randint(0, 50, shape, generator=draws).float()
        for k in (1, 777, shape[-1] // 2, shape[-1] - 1, shape[-1]):
            found = smallest(scores.to(device), k).cpu()
            require(torch.equal(found, smallest(scores, k)), "another selection", shape=shape, k=k)
    flags = torch.rand(100_003, generator=draws) < 0.3
    packed = PackedMask.pack(flags.to(device))
    require(packed.on_cpu() == PackedMask.pack(flags), "other bits of a packed mask")
    unpacked = packed.unpack(like=torch.zeros(1, device=device))
    require(torch.equal(unpacked.cpu().bool(), flags), "another unpacked mask")
    space = ParameterSpace(("a", "b"), ((100_000,), (3,)))
    require(space.count(flags.to(device)) == space.count(flags), "other counts")
    there, here = (hashed(5, 1000, place) for place in (device, torch.device("cpu")))
    require(torch.equal(there.cpu(), here), "other random numbers")
    return {}


def many(options: Options) -> dict[str, Any]:
    """Twelve different engines of one process are all compiled. torch keeps eight variants of a function."""
    words = [word for word in options.compiled(*DETERMINISTIC) if not word.startswith("engine")]
    base = engine_of(small("lenet5", options, "engine=eager", *words))
    assert isinstance(base, EagerEngine)
    inputs, graphs = base.examples.empty_inputs(1).numel(), []
    for width in range(3, 15):
        before = counters["stats"]["unique_graphs"]
        model = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 26))
        eager = EagerEngine(base.fabric, model, base.settings, base.examples)
        Compiled(name="compiled", compiler="aot_eager", lanes=1).build(eager, Workload(largest=40, steps=9))
        graphs.append(counters["stats"]["unique_graphs"] - before)
    require(graphs[0] > 0 and len(set(graphs)) == 1, "some engines are not compiled", graphs=graphs)
    return {"graphs": graphs[0]}


CHECKS = [
    *(
        Check("right", f"agreement of lenet5 in {precision}", 90, partial(agreement, "lenet5", precision))
        for precision in TOLERANCES
    ),
    *(
        Check("right", f"agreement of {model} in {precision}", 120, partial(agreement, model, precision))
        for model, precision in (("vgg11", "bf16-mixed"), ("resnet18", "32-true"))
    ),
    Check("right", "repeats", 90, repeats),
    Check("right", "dropout", 90, dropout),
    *(
        Check("right", f"resume in {precision}", 90, partial(resume, precision))
        for precision in ("32-true", "bf16-mixed")
    ),
    Check("right", "selection", 30, selection),
    Check("right", "many engines in a process", 90, many),
]
