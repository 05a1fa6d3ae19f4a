"""How often the host waits for the device while a client's update is queued, for every method and mask searcher.

The meta device stands in for a GPU. It has shapes and no values, so that code which reads a value from it fails.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_every_method import METHODS, OPTIONS, SMALL

from fedspa.core import packed_mask, transfers
from fedspa.core.packed_mask import PackedMask
from fedspa.core.paths import config_dir
from fedspa.federated.client import LocalClient
from fedspa.federated.client_states import Room
from fedspa.federated.jobs import CompletedUpdate
from fedspa.federated.server import Server
from fedspa.federated.state import FederationState
from fedspa.planning.counting import CountingEngine, counts_by_tensor, most_mixed
from fedspa.runs.assembly import build
from fedspa.training.base import LocalTask

META = torch.device("meta")


class MetaEngine(CountingEngine):
    """Training without values."""

    def train(self, task: LocalTask) -> Any:
        assert task.weights.device == META
        ended = super().train(task)
        return replace(ended, weights=task.weights.clone(), loss=ended.loss.to(META))

    def accuracy(self, weights: torch.Tensor, rows: torch.Tensor) -> float:
        return 0.5

    def outputs(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return super().outputs(weights, rows).to(META)

    def predict(self, weights: Any, examples: Any, rows: torch.Tensor, batch_size: int) -> torch.Tensor:
        return super().predict(weights, examples, rows, batch_size).to(META)

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(weights)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The waits of each client, in order. `Client.read` gives 0.5, or true."""
    counted: list[int] = []

    class Watched(LocalClient):
        def __init__(self, *args: Any, **options: Any) -> None:
            counted.append(0)
            self._place = len(counted) - 1
            super().__init__(*args, **options)

        @property
        def waits(self) -> int:
            return counted[self._place]

        @waits.setter
        def waits(self, count: int) -> None:
            counted[self._place] = count

        def read(self, value: torch.Tensor) -> torch.Tensor:
            self.waits += 1
            return torch.full(value.shape, 0.5).to(value.dtype)

    monkeypatch.setattr("fedspa.federated.client_runner.LocalClient", Watched)
    return counted


def on_meta(run: Any) -> tuple[Any, FederationState]:
    """A run's client runner on the meta device, and the state before round 1."""
    setup = run.runner.setup
    engine = MetaEngine(setup.engine.space, setup.training, classes=10, device=META, lanes=1)
    layers = replace(setup.own_layers, initial=setup.own_layers.initial.to(META))
    initial = replace(setup.initial, weights=setup.initial.weights.to(META))
    runner = replace(run.runner, setup=replace(setup, engine=engine, own_layers=layers, initial=initial))
    return runner, FederationState.start(runner)


MAY_WAIT = {"subfedavg": 2, "lotteryfl": 1, "fedselect": 1, "mapper": 1}
"""The methods that decide by a value, and how often at most in an update."""
COMPARES = ["feddst"]
"""Methods that compare masks by value when they send. All clients of the round are queued then."""
SEARCHES_BY_VALUE = ["deepr", "dsr", "granet", "snfs"]
"""Searchers that count active parameters within a search."""
SEARCHERS = sorted(path.stem for path in (config_dir() / "mask").glob("*.yaml"))
MORE = {
    **OPTIONS,
    "fedselect": ("method.every=1",),
    "dst": ("mask.regrow=random",),
    "nm": ("layer_sparsity=uniform",),
}
ROOM = 1e6
CASES = [("method", name, ROOM) for name in METHODS if name not in COMPARES]
CASES += [("mask", name, ROOM) for name in SEARCHERS if name not in ["none", *SEARCHES_BY_VALUE]]


@pytest.mark.parametrize(("group", "name", "room"), [*CASES, ("mask", "dst", 0)])
def test_a_client_queues_its_update_without_reading_a_value(plan, waits, monkeypatch, group, name, room):
    """And a mask that was made on the device is not sent there again, if there is room for it."""
    run = build(plan(f"{group}={name}", *SMALL, *MORE.get(name, ()), "faults.norm_bound=1"))
    runner, state = on_meta(run)
    runner = replace(runner, room=Room(room))
    searcher = run.runner.method.searcher if run.runner.method.uses_mask else None

    space, network = runner.setup.space, runner.setup.network
    planned = searcher.counts if searcher else lambda round: space.sizes

    def read(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Ones; where tensors are counted the counts of the searcher's plan; a mask that has them."""
        known = counts_by_tensor(planned(job.round), most_mixed, space.parameters.sizes, network)
        counts = [*known, *space.running.sizes][: len(space.sizes)]
        mask = torch.cat(
            [torch.arange(size) < count for size, count in zip(space.sizes, counts, strict=True)]
        )
        results = {(len(counts),): torch.tensor(counts), (-(-len(mask) // 8),): PackedMask.pack(mask).bits}
        return [
            results.get(tuple(tensor.shape), torch.ones(tensor.shape, dtype=tensor.dtype))
            for tensor in tensors
        ]

    uploads: list[torch.Tensor] = []

    def sent(bits: torch.Tensor, device: torch.device) -> torch.Tensor:
        uploads.extend([bits] if bits.device.type == "cpu" else [])
        return transfers.sent(bits, device)

    monkeypatch.setattr(packed_mask, "sent", sent)
    monkeypatch.setattr(transfers, "read_together", read)
    server = Server(runner.method, runner.setup, 4)
    for round in range(2):
        job = replace(server.job(state, 0, None), round=round)
        result = runner.perform(job, state.server if job.message is None else job.message)
        assert isinstance(result, CompletedUpdate), result
        assert result.update.state is not None
        mask = result.update.state.mask
        known = job.state.mask
        if mask is not None and known is not None:
            assert mask.bits.device.type == "cpu"
            made = mask is not known
            assert (mask.resident is not None) == (known.resident is not None or made and room > 0)
            assert known.resident is None or not any(bits is known.bits for bits in uploads)
        state.remember(0, result.update)
    assert len(waits) == 2 and max(waits) <= MAY_WAIT.get(name, 0)
    assert any(waits) == (name in MAY_WAIT)
