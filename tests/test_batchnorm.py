"""BatchNorm under federated training: what becomes of its running statistics, by hand and in whole rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batchnorm_runs import CLIENTS, METHODS, network, run
from federations import (
    Federation,
    engine,
    federation,
    pixels,
    random_clients,
    random_images,
    train,
    two_workers,
)
from torch import nn

from fedspa.communication.wire import update_bytes
from fedspa.core.client import Proximal
from fedspa.core.settings import TrainingSettings
from fedspa.core.weights import ParameterSpace
from fedspa.costs.network import NetworkCosts
from fedspa.methods.fedavg import FedAvg
from fedspa.training.compiled import CompiledEngine
from fedspa.training.workload import Workload


def statistics(federation: Federation, weights: torch.Tensor) -> torch.Tensor:
    return weights[federation.space.trained :]


class Brightness(nn.Module):
    """BatchNorm of one channel: its running mean follows the mean pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1, momentum=0.5)
        self.head = nn.Linear(1, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(images).mean((2, 3)))


@pytest.mark.parametrize(("weighting", "shares"), [("samples", (1 / 4, 3 / 4)), ("uniform", (1 / 2, 1 / 2))])
def test_the_average_of_two_clients_by_hand(weighting, shares):
    """One batch a client. Its running mean is half the mean of its own batch and half the 0 it began with, its running
    variance half the unbiased variance and half the 1; the server's are theirs by the method's own weights."""
    clients = random_clients(2, 6, side=3, classes=2)
    run = federation(
        FedAvg(name="fedavg", weighting=weighting),
        Brightness(),
        clients,
        TrainingSettings(epochs=1, batch_size=8),
    )
    batches = [(clients.train.inputs[rows].double() / 255 - 0.5) / 0.25 for rows in clients.train_rows]
    wanted = [
        sum(share * float(batch.mean()) / 2 for share, batch in zip(shares, batches, strict=True)),
        sum(share * (1 + float(batch.var())) / 2 for share, batch in zip(shares, batches, strict=True)),
    ]
    (record,) = run.run()
    assert statistics(run, run.initial).tolist() == [0, 1]
    assert statistics(run, run.weights).tolist() == pytest.approx(wanted, rel=1e-12)
    values = ParameterSpace.of(Brightness()).total
    assert values == 2 + 4 + 2
    assert (
        record.costs.down_bytes == record.costs.up_bytes == 2 * 4 * values
    )  # two clients, four bytes a value


def test_statistics_are_neither_decayed_nor_clipped_nor_pulled():
    """They are those of a plain loop without any optimizer: what is multiplied by the learning rate is not in them."""
    images = random_images(8, 8, 3, seed=5)
    training = TrainingSettings(epochs=3, batch_size=4, weight_decay=1e6, clip_norm=1e-9, momentum=0.9)
    runner, rows = engine(network(), pixels(images), training), torch.arange(8)
    proximal = Proximal(runner.weights + 1, 1e9)
    generator = torch.Generator()
    trained = train(
        runner, runner.weights, rows, epochs=3, learning_rate=0.0, generator=generator, proximal=proximal
    )
    plain, source = network().double().train(), torch.Generator()
    for _ in range(3):
        for batch in pixels(images).epoch(rows, 4, source):
            plain(batch.inputs)
    wanted = torch.cat([buffer.flatten() for name, buffer in plain.named_buffers() if "num" not in name])
    torch.testing.assert_close(trained.weights[runner.space.trained :], wanted)


@pytest.mark.parametrize("name", METHODS)
def test_masks_gradients_and_updates_leave_the_statistics_to_the_average(name):
    """The global statistics are the clients' by the method's weights, whatever its masks, and none is ever pruned."""
    done = run(name)
    before, method = statistics(done, done.initial), METHODS[name][0]
    for _ in done.loop.rounds():
        updates = done.updates[-4:]
        assert all(not torch.equal(statistics(done, update.local), before) for _, update in updates)
        for _, update in updates:
            if update.mask is not None:
                assert statistics(done, update.mask).all()
        after = statistics(done, done.weights)
        if name != "local":
            shares = torch.tensor([method.weight(len(CLIENTS.train_rows[client])) for client, _ in updates])
            mean = (shares / shares.sum()).double() @ torch.stack(
                [statistics(done, update.local) for _, update in updates]
            )
            torch.testing.assert_close(after, mean)
    if METHODS[name][1]:
        assert done.loop.state.density(0) == (18 + 108 + 9 + 2 * 4 + 6 + 2 * 6 + 3) / 299


@pytest.mark.parametrize("name", ["fedavg", "fedspa-dst", "ditto", "subsampling", "subfedavg"])
def test_compiled_rounds_are_those_of_the_eager_engine(name):
    eager = run(name)
    other = run(
        name, engine_of=lambda one: CompiledEngine(one, Workload(largest=14, steps=100), compiler=None)
    )
    for reference, record in zip(eager.run(), other.run(), strict=True):
        assert record.loss == pytest.approx(reference.loss, rel=1e-10) and record.scores == reference.scores
    for (_, ours), (_, theirs) in zip(other.updates, eager.updates, strict=True):
        assert (ours.local - theirs.local).norm() <= 1e-10 * (theirs.local - eager.initial).norm()
    torch.testing.assert_close(
        statistics(other, other.weights), statistics(eager, eager.weights), rtol=1e-10, atol=0
    )


def test_the_step_with_batchnorm_compiles_and_updates_the_statistics():
    def compiled(one):
        return CompiledEngine(one, Workload(largest=14, steps=100), compiler="aot_eager")

    eager, other = run("fedspa-dst"), run("fedspa-dst", engine_of=compiled)
    eager.run(), other.run()
    torch.testing.assert_close(other.weights, eager.weights, rtol=1e-9, atol=1e-12)


def test_two_workers_leave_the_same_bytes():
    alone, shared = (
        run("fedspa-dst", dtype=torch.float32),
        run("fedspa-dst", dtype=torch.float32, executor=two_workers),
    )
    ours, theirs = alone.run(), shared.run()
    shared.close()
    assert torch.equal(alone.weights, shared.weights)
    assert [record.scores for record in ours] == [record.scores for record in theirs]


def test_the_network_without_its_statistics_has_the_same_flops():
    with_them = NetworkCosts.of(network(), (1, 8, 8))
    assert with_them.statistics == 2 * (4 + 6) and with_them.parameters == 36 + 8 + 216 + 6 + 12 + 18 + 3
    assert with_them.value_bytes() == 4 * (with_them.parameters + 20)
    assert with_them.flops_per_active[-4:] == (0, 0, 0, 0)


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_statistics_are_averaged_exactly_through_a_rounding_wire(wire):
    """A variance that falls from 0.9985 to nearly 0 within an update. Rounded to bf16 it is 1 on its way down, and so
    is the update on its way up: the server would be left with a negative variance, of which the network makes NaN."""
    clients = random_clients(2, 6, side=3, classes=2)
    clients.train.inputs.copy_(127 + clients.train.inputs % 2)
    model = Brightness()
    model.norm.momentum, model.norm.running_var = 1.0, torch.tensor([0.9985])
    training = TrainingSettings(epochs=1, batch_size=8)
    done = federation(FedAvg(name="fedavg"), model, clients, training, wire=wire, dtype=torch.float32)
    (record,) = done.run()
    batches = [(clients.train.inputs[rows].float() / 255 - 0.5) / 0.25 for rows in clients.train_rows]
    wanted = [
        sum(share * float(figure(batch)) for share, batch in zip((1 / 4, 3 / 4), batches, strict=True))
        for figure in (torch.mean, torch.var)
    ]
    assert wanted[1] < 1e-3
    assert statistics(done, done.weights).tolist() == pytest.approx(wanted, rel=1e-3)
    costs, tensors = record.costs, len(done.space.sizes)
    one = replace(costs, down_bytes=costs.down_bytes // 2, up_bytes=costs.up_bytes // 2)
    frames = 2 * (40 + (2 * tensors + 7) // 8 + 8)
    assert update_bytes(one, tensors, wire, statistics=2) == frames + 2 * (6 * 2 + 2 * 4)  # down and up
    assert costs.encoded_bytes == 2 * update_bytes(one, tensors, wire, statistics=2)
