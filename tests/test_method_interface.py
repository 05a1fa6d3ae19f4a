"""What a method may do through its interface: tensors of the server, errors of its own, a training that diverges."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from archives import pack, unpack
from batchnorm_runs import run as batchnorm_run
from by_hand import CLIENTS, LABELS, LRS, PICTURES, W0, Vector, loss_and_gradient, sgd
from federations import Clients, Federation, federation, small, two_workers
from torch import nn

from fedspa.core.client import Client, ClientUpdate, Diverged, Initial
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.records import Costs
from fedspa.core.server import Aggregate, ServerState
from fedspa.core.settings import FaultSettings, TrainingSettings
from fedspa.data.sets import ArraySet
from fedspa.federated.executor import InProcess
from fedspa.methods.base import Method
from fedspa.methods.fedavg import FedAvg
from fedspa.planning.cost_report import CostReport
from fedspa.planning.counting import Update, UpdateCosts
from fedspa.runs.assembly import build
from fedspa.training.local_training import LocalTraining

ROWS = [3, 5]
STEPS = 2


@dataclass(kw_only=True)
class ControlVariates(Method):
    """SCAFFOLD (Karimireddy et al., 2020, option II), and a second tensor of the server: the mean samples by round."""

    weighting: str = "uniform"

    def client_init(self, client: int, initial: Initial) -> ClientState:
        return ClientState(control=torch.zeros_like(initial.weights))

    def server_init(self, initial: Initial) -> ServerState:
        zeros = torch.zeros_like(initial.weights)
        return ServerState(initial.weights, {"control": zeros, "samples": zeros.new_zeros(2)})

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        own, correction = client.state.tensor("control"), server["control"]
        trained = client.train(client.weights, correction=correction - own)
        update = client.weights - trained.weights
        control = own - correction + update / (STEPS * client.training.lr_at(client.round))
        samples = torch.zeros_like(server["samples"])
        samples[client.round] = trained.samples
        return ClientUpdate(
            update=update,
            tensors={"control": control - own, "samples": samples},
            state=ClientState(control=control),
            local=trained.weights,
        )

    def server_update(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        control = server["control"] + aggregate.participation * aggregate.tensors["control"]
        samples = server["samples"] + aggregate.tensors["samples"]
        return ServerState(server.weights - aggregate.update, {"control": control, "samples": samples})


CONTROL_VARIATES = ControlVariates(name="control_variates")


def tiny(
    method: Method = CONTROL_VARIATES, training: dict[str, Any] | None = None, **options: Any
) -> Federation:
    """The federation of by_hand.py: 15 weights, two clients of 3 and 5 pictures, two steps a round, two rounds."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    nn.utils.vector_to_parameters(torch.from_numpy(W0), network.parameters())
    data = ArraySet(torch.from_numpy(PICTURES.astype(np.uint8)).view(14, 1, 2, 2), torch.from_numpy(LABELS))
    rows = [np.arange(0, 3), np.arange(3, 8)], [np.arange(8, 12), np.arange(12, 14)]
    settings = {"epochs": STEPS, "batch_size": 8, "clip_norm": None, "weight_decay": 0.0, **(training or {})}
    return federation(
        method,
        network,
        Clients(data, data, *rows, classes=3),
        TrainingSettings(lr=0.5, lr_decay=0.5, **settings),
        **{"rounds": 2, **options},
    )


@dataclass(frozen=True)
class Hand:
    """The server and the clients after a round, by hand."""

    weights: Vector
    control: Vector
    samples: Vector
    own: list[Vector]


def by_hand(participants: list[tuple[int, ...]], wire: Callable[[Vector], Vector]) -> list[Hand]:
    """SCAFFOLD in NumPy. `wire` is what is left of numbers on their way."""
    weights, control, samples = W0, np.zeros(15), np.zeros(2)
    own = [np.zeros(15), np.zeros(15)]
    rounds = []
    for t, (lr, chosen) in enumerate(zip(LRS, participants, strict=True)):
        updates, changes, counts = [], [], []
        start, received = wire(weights), wire(control)
        for k in chosen:
            end = start
            for _ in range(STEPS):
                end = end - lr * (loss_and_gradient(end, CLIENTS[k].x, CLIENTS[k].y)[1] + received - own[k])
            after = own[k] - received + (start - end) / (STEPS * lr)
            updates.append(wire(start - end))
            changes.append(wire(after - own[k]))
            counts.append(STEPS * ROWS[k])
            own[k] = after
        weights = weights - np.mean(updates, axis=0)
        control = control + len(chosen) / 2 * np.mean(changes, axis=0)
        samples = samples + np.eye(2)[t] * np.mean(counts)
        rounds.append(Hand(weights, control, samples, list(own)))
    return rounds


def fp32(vector: Vector) -> Vector:
    return vector.astype(np.float32).astype(np.float64)


def equal(actual: torch.Tensor, expected: Vector) -> None:
    np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("wire", [None, "fp32"])
@pytest.mark.parametrize("executor", [InProcess, two_workers])
@pytest.mark.parametrize("clients_per_round", [2, 1])
def test_a_method_with_tensors_of_the_server_by_hand(wire, executor, clients_per_round):
    run = tiny(wire=wire, executor=executor, clients_per_round=clients_per_round)
    server = run.loop.state.server
    assert set(server.tensors) == {"control", "samples"} and not server["control"].any()
    try:
        reached = [(record, run.loop.state) for record in run.loop.rounds()]
    finally:
        run.close()
    participants = [record.participants for record, _ in reached]
    assert [len(chosen) for chosen in participants] == [clients_per_round] * 2
    hand = by_hand(participants, fp32 if wire else lambda vector: vector)
    for expected, (_, state) in zip(hand, reached, strict=True):
        equal(state.weights, expected.weights)
        equal(state.server["control"], expected.control)
        equal(state.server["samples"], expected.samples)
        for client in state.clients:
            equal(state.client_state(client).tensor("control"), expected.own[client])
    assert abs(hand[1].control).max() > 1e-2  # else nothing is proven
    plain = sgd(hand[0].weights, CLIENTS[0], LRS[1]).end
    assert abs(run.updates[-1][1].local.numpy() - plain).max() > 1e-3


def test_the_wire_does_round():
    exact, rounded = (by_hand([(0, 1)] * 2, wire) for wire in (lambda vector: vector, fp32))
    assert 1e-10 < abs(exact[1].weights - rounded[1].weights).max() < 1e-6


@pytest.mark.parametrize("wire", [None, "fp32"])
def test_tensors_are_charged_four_bytes_a_value_each_way(wire):
    plain, run = (tiny(method, wire=wire) for method in (FedAvg(name="fedavg"), CONTROL_VARIATES))
    further = 4 * (15 + 2)
    for reference, record in zip(plain.run(), run.run(), strict=True):
        assert reference.costs.down_bytes == reference.costs.up_bytes == 2 * 4 * 15
        more = Costs(
            down_bytes=2 * further,
            up_bytes=2 * further,
            # Each of the four messages has a second part: a header of 16 bytes and a checksum of 8.
            encoded_bytes=4 * (16 + further + 8) if wire else 0,
        )
        assert record.costs == reference.costs + more
        assert record.dense_costs == reference.dense_costs


@pytest.mark.parametrize("clients_per_round", [2, 1])
def test_costs_counted_before_the_run_are_those_of_the_run(clients_per_round):
    run = tiny(clients_per_round=clients_per_round)
    setup = run.loop._setup
    count = UpdateCosts(CONTROL_VARIATES, run.space, setup.training)
    seen: set[int] = set()
    for t, record in enumerate(run.loop.rounds()):
        counted = Costs()
        for client in record.participants:
            counted += count(setup.network, Update(ROWS[client], client not in seen, t))
            seen.add(client)
        assert counted == record.costs
        assert counted.down_bytes == counted.up_bytes == clients_per_round * 4 * (15 + 15 + 2)


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
def test_a_report_of_costs_is_exact_to_the_encoded_byte(plan, wire):
    """The further tensors travel in fp32 whatever the wire, in messages of their own."""
    made = plan(
        *("dataset=synthetic", "model=small_cnn", "partition=iid", "logger=none", "hardware=cpu"),
        *("federation.clients=4", "federation.clients_per_round=2", "federation.rounds=2", "mask=none"),
        *(
            "method=fedavg",
            "method._target_=test_method_interface.ControlVariates",
            f"federation.wire={wire}",
        ),
        *("trusted_packages=[test_method_interface]", "hardware.workers=1", "training.epochs=1"),
    )
    report, built = CostReport.of(made), build(made)
    *_, last = built.loop.rounds()
    assert last.total_costs == report.total
    plain = CostReport.of(replace(made, method=FedAvg(name="fedavg"))).total
    assert report.total.encoded_bytes - plain.encoded_bytes == 2 * 2 * 2 * (
        16 + 4 * (report.space.total + 2) + 8
    )


@pytest.mark.parametrize("wire", [None, "fp32"])
def test_a_resumed_run_goes_on_with_the_tensors_of_the_server_to_the_byte(wire):
    whole, broken, resumed = (tiny(wire=wire) for _ in range(3))
    records = whole.run()
    next(broken.loop.rounds())
    resumed.loop.load_state_dict(unpack(pack(broken.loop.state_dict())))
    for name, tensor in broken.loop.state.server.tensors.items():
        assert torch.equal(resumed.loop.state.server[name], tensor)
    assert resumed.loop.state.server["control"].any()
    (last,) = resumed.run()
    assert replace(last, seconds={}) == replace(records[-1], seconds={})
    assert pack(resumed.loop.state_dict()) == pack(whole.loop.state_dict())


def test_a_damaged_part_with_tensors_is_refused_as_any_other():
    run = tiny(wire="fp32", faults=FaultSettings(corruption=1.0))
    records = run.run()
    assert records[-1].total_events["corrupt"] == 4
    equal(run.weights, W0)
    assert not run.loop.state.server["control"].any()


# Errors ---------------------------------------------------------------------------------------------------


def test_an_error_in_a_training_step_has_the_method_in_its_stack_trace(monkeypatch):
    """And whatever asked it: nothing of it is hidden by a generator or by another process."""

    def fail(self: LocalTraining, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        raise ZeroDivisionError("a bug")

    run = tiny()
    monkeypatch.setattr(LocalTraining, "training_step", fail)
    with pytest.raises(ZeroDivisionError, match="a bug") as caught:
        run.run()
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    order = [frames.index(name) for name in ("rounds", "client_update", "train", "fail")]
    assert order == sorted(order) and frames[-1] == "fail"
    (own,) = [
        frame
        for frame in traceback.extract_tb(caught.value.__traceback__)
        if frame.name == "client_update" and frame.filename == __file__
    ]
    assert "client.train(" in (own.line or "")


@dataclass(kw_only=True)
class Careful(FedAvg):
    """Client 1 trains from weights that no float can hold first, and then, if it is careful, as the others do."""

    careful: bool = True

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        if client.id == 1:
            try:
                client.train(client.weights * math.inf, epochs=1)
            except Diverged as error:
                assert "not finite" in str(error)
                if not self.careful:
                    raise
        return super().client_update(client, server)


def test_a_training_that_diverges_can_be_caught_and_is_charged():
    plain, careful = tiny(FedAvg(name="fedavg")), tiny(Careful(name="careful"))
    for reference, record in zip(plain.run(), careful.run(), strict=True):
        assert record.events == () and record.scores == reference.scores
        assert record.costs == reference.costs + Costs(train_flops=3 * 27 * ROWS[1])
        assert record.loss == reference.loss  # that of the trainings which came to an end
    assert torch.equal(plain.weights, careful.weights)


def test_layers_of_its_own_are_those_before_a_training_that_was_caught():
    """Else the second training would begin with layers that are not finite."""
    plain, careful = (
        batchnorm_run("fedavg", "norm", method=method)
        for method in (FedAvg(name="fedavg"), Careful(name="careful"))
    )
    for reference, record in zip(plain.run(), careful.run(), strict=True):
        assert record.events == () and (record.loss, record.scores) == (reference.loss, reference.scores)
    assert torch.equal(plain.weights, careful.weights)
    for client in range(4):
        assert plain.loop.state.client_state(client) == careful.loop.state.client_state(client)


def test_a_training_that_diverges_fails_the_update_if_nobody_catches_it():
    careless = Careful(name="careless", careful=False)
    with pytest.raises(
        UserError, match="client 1 in round 1 diverged: its weights or its loss .* not finite"
    ):
        tiny(careless).run()
    run = tiny(careless, faults=FaultSettings(policy="skip"))
    (first, second) = run.run()
    assert [(event.client, event.kind) for event in (*first.events, *second.events)] == [(1, "diverged")] * 2
    alone = W0
    for lr in LRS:
        alone = sgd(alone, CLIENTS[0], lr).end
    equal(run.weights, alone)
    assert set(run.loop.state.clients) == {0}
    assert first.costs == Costs(
        train_flops=3 * 27 * (STEPS * ROWS[0] + ROWS[1]), down_bytes=2 * 4 * 15, up_bytes=4 * 15
    )


@dataclass(kw_only=True)
class Waits(FedAvg):
    """Trains from the second round on."""

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        if client.round:
            return super().client_update(client, server)
        return ClientUpdate(update=torch.zeros_like(client.weights), local=client.weights)


def test_an_update_without_any_training_has_no_loss():
    first, second = tiny(Waits(name="waits")).run()
    assert first.loss is None and first.samples == 0 and first.costs.train_flops == 0
    assert second.loss is not None and second.samples == 2 * sum(ROWS)
    assert small(Waits(name="waits"), rounds=2).run()[0].loss is None
