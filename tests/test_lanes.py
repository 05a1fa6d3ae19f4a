"""Clients in lanes: the bytes of one after another, the same faults, and nothing on the way waits for the device.

There is no GPU here. Lanes without streams keep the order of work of a GPU; tensors on torch's meta device have no
values, so that whoever reads one fails; streams are replaced by ones that write down who waits for whom.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federations import Federation, engine
from hypothesis import given
from hypothesis import strategies as st
from tape import TapeCaptures
from test_engines import AUGMENTED, SMALL, WORK, network, run_of, tasks, trained
from test_faults import METHODS as FAULTY_METHODS
from test_faults import SOME, exploding, linear, told
from torch import nn
from torch._dynamo.utils import counters

from fedspa.core import transfers
from fedspa.core.client import Mixture, Proximal
from fedspa.core.errors import UserError
from fedspa.core.settings import FaultSettings, TrainingSettings
from fedspa.core.transfers import Reads, joined, parted
from fedspa.federated import executor
from fedspa.training import compiled
from fedspa.training.capture import WARM_UPS, Captures
from fedspa.training.compiled import CompiledEngine
from fedspa.training.eager import EagerEngine


def lanes(count: int | None, compiler: str | None = None) -> Any:
    return lambda eager: CompiledEngine(eager, WORK, compiler, count)


# The same results as one after another


def same(one: Federation, other: Federation) -> None:
    """Run both, and compare all that they leave."""
    assert told(other.run()) == told(one.run())
    assert torch.equal(other.weights, one.weights)
    assert other.losses == one.losses
    ours, theirs = other.loop.state, one.loop.state
    assert dict(ours.clients) == dict(theirs.clients) and ours.updates == theirs.updates
    for (_, update), (_, reference) in zip(other.updates, one.updates, strict=True):
        assert update.state == reference.state and torch.equal(update.local, reference.local)


TROUBLE = {
    "simulated": ({"faults": replace(SOME, policy="skip"), "wire": "fp16"}, 1),
    "clipped": ({"faults": FaultSettings(norm_bound=0.3, norm_action="clip"), "wire": None}, 3),
    "diverged": ({"faults": FaultSettings(policy="skip"), "wire": None}, 3),
}


@pytest.mark.parametrize("name", FAULTY_METHODS)
@pytest.mark.parametrize("trouble", TROUBLE)
def test_any_number_of_lanes_gives_the_same_bytes(name, trouble, monkeypatch):
    """Also with more clients than are queued at a time."""
    monkeypatch.setattr(executor, "AHEAD", 3)
    method, searcher = FAULTY_METHODS[name]
    if trouble == "diverged":
        method = exploding(method)
    options, count = TROUBLE[trouble]
    same(*(linear(method, searcher, **options, engine_of=lanes(number)) for number in (None, count)))


@pytest.mark.parametrize("count", [None, 2])
def test_a_client_that_diverges_discards_the_round(count):
    run = linear(
        exploding(FAULTY_METHODS["fedavg"][0]), None, FaultSettings(), wire=None, engine_of=lanes(count)
    )
    with pytest.raises(
        UserError, match=r"client 1 in round 1 diverged: .* not finite; lower training.lr=0.1"
    ):
        run.run()
    assert torch.equal(run.weights, run.initial) and run.loop.state.round == 0


def test_a_run_in_lanes_leaves_the_same_files(tmp_path):
    for name, words in (("one", []), ("two", ["engine.lanes=2"])):
        words = [*SMALL, "engine=compiled", "engine.compiler=null", "finetune.epochs=1", *words]
        run_of(words, tmp_path / name)
    for file in ("weights.safetensors", "masks.safetensors", "clients.csv", "costs.csv"):
        one, two = ((tmp_path / name / file) for name in ("one", "two"))
        assert one.exists() == two.exists()
        if one.exists():
            assert one.read_bytes() == two.read_bytes()


def test_a_number_of_lanes_that_cannot_be_is_refused(plan):
    for name in ("auto", "compiled"):
        with pytest.raises(UserError, match="engine.lanes=0 is out of range"):
            plan(f"engine={name}", "engine.lanes=0")


# Nothing waits on the way


tensors = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(
        lambda shape: (torch.rand(shape) * 100).to(dtype)
    )
)


@given(st.lists(tensors, min_size=1, max_size=6))
def test_what_travels_as_bytes_comes_back_as_it_was(items):
    for item, again in zip(items, parted(joined(items), items), strict=True):
        assert again.dtype == item.dtype and torch.equal(again, item)


def test_values_are_read_once_for_all_who_need_them(monkeypatch):
    calls = []
    monkeypatch.setattr(transfers, "read_together", lambda items: calls.append(len(items)) or list(items))
    reads = Reads()
    one, two = reads.add([torch.ones(1), torch.zeros(2)]), reads.add([torch.ones(3)])
    assert [len(tensor) for tensor in (*two(), *one())] == [3, 1, 2] and calls == [3]


# Streams, graphs and compilers


class Stream:
    """Writes down whom it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} is done")
        return f"{self.name}'s work"


def test_lanes_begin_after_the_main_stream_which_goes_on_after_all_of_them(monkeypatch):
    log: list[str] = []
    main = Stream("main", log)
    made = lanes(2)(engine(network(), AUGMENTED, TrainingSettings(batch_size=4)))
    made._lanes = [
        lane._replace(stream=Stream(name, log)) for name, lane in zip("ab", made._lanes, strict=True)
    ]

    @contextmanager
    def current(stream: Stream) -> Any:
        log.append(f"in {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", current)
    work = [lambda number=number: log.append(f"client {number}") or number for number in range(3)]
    assert made.in_lanes(work) == [0, 1, 2]
    before, after = ["a waits for main", "b waits for main"], ["main waits for a", "main waits for b"]
    assert log == [*before, "in a", "client 0", "in b", "client 1", "in a", "client 2", *after]
    log.clear()
    with pytest.raises(ZeroDivisionError):
        made.in_lanes([lambda: 1 / 0])
    assert log == [*before, "in a", *after]


@pytest.mark.parametrize("work", ["outputs", "mixture", "full_gradient"])
def test_lanes_use_the_network_of_the_eager_engine_one_after_another(monkeypatch, work):
    made = lanes(2)(engine(network(), AUGMENTED, TrainingSettings(batch_size=4)))
    log: list[str] = []
    first, second = (
        lane._replace(stream=Stream(name, log)) for name, lane in zip("ab", made._lanes, strict=True)
    )
    load = made._eager.module.load
    monkeypatch.setattr(made._eager.module, "load", lambda weights: log.append("load") or load(weights))
    weights, rows = made.weights, torch.arange(4)
    for made._lane in (first, second):
        if work == "mixture":
            made.predict(Mixture(weights, weights, 0.5), AUGMENTED, rows, 4)
        else:
            getattr(made, work)(weights, rows)
    loads = ["load"] * (2 if work == "mixture" else 1)
    assert log == [*loads, "a is done", "b waits for a's work", *loads, "b is done"]


def test_the_graphs_of_a_lane_have_a_stream_and_a_pool_of_their_own(monkeypatch):
    log: list[str] = []

    class Graph:
        def pool(self) -> object:
            return self.memory

        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def capture(graph: Any, pool: object, stream: Stream) -> Any:
        graph.memory = pool or object()
        pools.append(graph.memory)
        log.append(f"capture in {stream.name}")
        yield

    @contextmanager
    def current(stream: Stream) -> Any:
        log.append(f"in {stream.name}")
        yield

    cuda = {"CUDAGraph": Graph, "graph": capture, "stream": current, "device": lambda device: nullcontext()}
    for name, stand_in in {**cuda, "synchronize": lambda: log.append("wait for all")}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    pools: list[object] = []
    for name in "ab":
        captures = Captures(torch.device("cuda"), Stream(name, log))
        for _ in range(2):
            log.clear()
            replay = captures(lambda: log.append("call"))
            warm_up = ["wait for all", f"in {name}", *["call"] * WARM_UPS, "wait for all"]
            assert log == [*warm_up, f"capture in {name}", "call"]
        replay()
        assert log[-1] == "replay"
    assert pools[0] is pools[1] is not pools[2] is pools[3]


class Graphs(TapeCaptures):
    """As on a GPU a call of a recorded function is one launch, which is counted."""

    records = True
    launches = 0

    def __call__(self, function: Any) -> Any:
        replay = super().__call__(function)

        def launched() -> None:
            Graphs.launches += 1
            replay()

        return launched


def test_many_steps_are_one_launch_and_give_the_same_bytes(monkeypatch):
    terms = {"proximal": Proximal(torch.zeros(243).double(), 0.5), "epochs": 9}

    def ended(eager: EagerEngine) -> list[torch.Tensor]:
        return [end.weights for end in trained(lanes(2)(eager), tasks(**terms))]

    settings = TrainingSettings(batch_size=4, epochs=5, momentum=0.5)
    single = ended(engine(network(), AUGMENTED, settings))
    monkeypatch.setattr(compiled, "Captures", Graphs)
    monkeypatch.setattr(Graphs, "launches", 0)
    several = ended(engine(network(), AUGMENTED, settings))
    assert all(map(torch.equal, several, single))
    # Plans of at most 25 steps are loaded at once, in graphs of 16 steps and of one. 18, 9 and 36 steps:
    assert Graphs.launches == (1 + 2) + 9 + (1 + 9 + 11)


def test_all_lanes_share_what_is_compiled():
    graphs = []
    for count in (1, 10):
        before = counters["stats"]["unique_graphs"]
        made = lanes(count, "aot_eager")(engine(network(), AUGMENTED, TrainingSettings(batch_size=4)))
        assert made.lanes == len(made._lanes) == count
        made.in_lanes([lambda made=made, task=task: made.train(task) for task in tasks()])
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs[0] == graphs[1] > 0


def test_a_network_that_draws_random_numbers_has_one_lane(caplog):
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3))
    made = lanes(3, "aot_eager")(engine(model, AUGMENTED, TrainingSettings(batch_size=4)))
    assert made.lanes == 1 and "trained in one lane" in caplog.text


@pytest.mark.parametrize(
    ("free", "taken", "participants", "count"),
    [(100, 10, 10, 6), (100, 10, 4, 4), (1000, 1, 20, 8), (9, 10, 10, 1), (100, 0, 3, 3)],
)
def test_lanes_are_as_many_as_half_of_the_free_memory_holds(monkeypatch, free, taken, participants, count):
    monkeypatch.setattr(compiled, "_free", lambda device: free)
    work = SimpleNamespace(participants=participants)
    engine_here = SimpleNamespace(device=torch.device("cuda"), _workload=work)
    assert CompiledEngine._affordable(engine_here, taken) == count  # type: ignore[arg-type]
