"""Data other than square images: features, tokens, oblong images, and targets that are numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn

from fedspa.communication.link import Link
from fedspa.core.client import Initial
from fedspa.core.errors import UserError
from fedspa.core.packed_mask import PackedMask
from fedspa.core.records import Costs, RoundRecord
from fedspa.core.settings import EvalSettings, FaultSettings, FederationSettings, TrainingSettings
from fedspa.costs.network import NetworkCosts
from fedspa.costs.units import show_flops, show_saved
from fedspa.data.examples import IGNORED, Arrays, Examples
from fedspa.data.pixels import Augmentation, Pixels
from fedspa.data.sets import ArraySet
from fedspa.federated.client_runner import ClientRunner
from fedspa.federated.client_setup import ClientSetup
from fedspa.federated.evaluation import Evaluator
from fedspa.federated.executor import InProcess
from fedspa.federated.loop import FederatedLoop
from fedspa.federated.messages import Messages
from fedspa.masks.dst import DST
from fedspa.masks.initial import InitialMasks
from fedspa.methods.base import Method
from fedspa.methods.fedavg import FedAvg
from fedspa.methods.fedspa import FedSpa
from fedspa.metrics.accuracy import Accuracy
from fedspa.metrics.mae import MeanAbsoluteError
from fedspa.metrics.mse import MeanSquaredError
from fedspa.models.initialise import seeded
from fedspa.training.base import Engine, LocalTask
from fedspa.training.compiled import CompiledEngine
from fedspa.training.eager import EagerEngine
from fedspa.training.workload import Workload

torch.set_num_threads(1)

CLIENTS, EACH, ROUNDS = 3, 10, 3
VOCABULARY, LENGTH = 12, 5


class Mlp(nn.Sequential):
    def __init__(self, outputs: int) -> None:
        super().__init__(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, outputs))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.gru = nn.GRU(8, 6, batch_first=True)
        self.fc = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.fc(self.gru(self.embedding(tokens))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.fc(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Oblong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc = nn.Linear(4 * 4 * 8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(F.relu(self.conv(images)).flatten(1))


@dataclass(frozen=True)
class Toy:
    """A kind of data, with a network for it."""

    make: Callable[[np.random.Generator, int, torch.dtype], Examples]
    network: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    tokens: bool = False
    numbers: bool = False
    uncounted: tuple[str, ...] = ()

    def examples(self, count: int, seed: int, dtype: torch.dtype) -> Examples:
        return self.make(np.random.default_rng(seed), count, dtype)

    def costs(self, network: nn.Module) -> NetworkCosts:
        return NetworkCosts.of(network, self.input_shape, input_dtype=torch.int64 if self.tokens else None)


def features(rng: np.random.Generator, count: int, dtype: torch.dtype) -> Examples:
    inputs = torch.from_numpy(rng.normal(size=(count, 7)))
    return Arrays(inputs, inputs[:, :3].argmax(1), "cpu", dtype)


def tokens(rng: np.random.Generator, count: int, dtype: torch.dtype) -> Examples:
    inputs = torch.from_numpy(rng.integers(VOCABULARY, size=(count, LENGTH)))
    return Arrays(inputs, inputs[:, -1] % 3, "cpu", dtype)


def oblong(rng: np.random.Generator, count: int, dtype: torch.dtype) -> Examples:
    labels = rng.integers(3, size=count)
    images = rng.integers(0, 128, size=(count, 1, 6, 10)) + 60 * labels.reshape(-1, 1, 1, 1)
    augmentation = Augmentation(crop_padding=1, flip=True, cutout=3)
    images = ArraySet(torch.from_numpy(images.astype(np.uint8)), torch.from_numpy(labels))
    return Pixels(images, [0.5], [0.25], augmentation, "cpu", dtype)


def regression(rng: np.random.Generator, count: int, dtype: torch.dtype) -> Examples:
    inputs = torch.from_numpy(rng.normal(size=(count, 7)))
    return Arrays(inputs, inputs[:, :2].cumsum(1), "cpu", dtype)


TOYS = {
    "features": Toy(features, lambda: Mlp(3), (7,)),
    "gru": Toy(tokens, Recurrent, (LENGTH,), tokens=True, uncounted=("gru (GRU)",)),
    "attention": Toy(
        tokens,
        Attention,
        (LENGTH,),
        tokens=True,
        uncounted=(
            "attention (MultiheadAttention)",
            "attention.out_proj (NonDynamicallyQuantizableLinear)",
        ),
    ),
    "oblong": Toy(oblong, Oblong, (1, 6, 10)),
    "regression": Toy(regression, lambda: Mlp(2), (7,), numbers=True),
}


def fedspa() -> FedSpa:
    method = FedSpa(name="fedspa")
    method.searcher = DST(name="dst", alpha0=0.5)
    return method


METHODS: dict[str, Callable[[], Method]] = {
    "fedavg": lambda: FedAvg(name="fedavg"),
    "fedspa": fedspa,
}
METRICS = {
    False: {"accuracy": Accuracy(name="accuracy")},
    True: {"mse": MeanSquaredError(name="mse"), "mae": MeanAbsoluteError(name="mae")},
}


@cache
def fabric(dtype: torch.dtype) -> Fabric:
    precisions = {torch.float64: "64-true", torch.float32: "32-true"}
    return Fabric(accelerator="cpu", devices=1, precision=precisions[dtype])


def eager_engine(
    toy: Toy, train: Examples, training: TrainingSettings, network: nn.Module | None = None
) -> EagerEngine:
    network = (network or seeded(toy.network, seed=0)).to(train.dtype)
    return EagerEngine(fabric(train.dtype), network, training, train)


def compiled(eager: EagerEngine) -> CompiledEngine:
    return CompiledEngine(
        eager, Workload(largest=EACH, steps=1, gradients=True, test_batches=(4,)), compiler=None
    )


def loop(
    toy: Toy,
    method: Method,
    *,
    training: TrainingSettings | None = None,
    network: nn.Module | None = None,
    each: int = EACH,
    engine_of: Callable[[EagerEngine], Engine] = lambda eager: eager,
    train: Examples | None = None,
    wire: str | None = None,
) -> FederatedLoop:
    """Three clients, all of them in every round; half of the parameters of every tensor are masked."""
    dtype = torch.float64
    training = training or TrainingSettings(epochs=2, batch_size=4, lr=0.1, clip_norm=None, momentum=0.5)
    train = train or toy.examples(CLIENTS * each, 0, dtype)
    engine = engine_of(eager_engine(toy, train, training, network))
    space, weights = engine.space, engine.weights
    rows = np.split(np.arange(CLIENTS * each), CLIENTS)
    full = PackedMask.pack(torch.ones(space.total))
    active = [size - size // 2 for size in space.sizes] if method.uses_mask else []
    masks = InitialMasks(space, active, shared=True, seed=0) if active else lambda client: full
    costs = toy.costs(network or seeded(toy.network, seed=0))
    runner = ClientRunner(
        setup=ClientSetup(seed=0, training=training, engine=engine, network=costs, client_rows=rows),
        method=method,
        messages=Messages(costs, 0, Link(space, wire, 0) if wire else None),
        evaluators=[Evaluator(train, rows, METRICS[toy.numbers], 0 if toy.numbers else 3, batch_size=4)],
        faults=FaultSettings(),
    )
    federation, initial = FederationSettings(CLIENTS, CLIENTS, ROUNDS), Initial(weights, masks, full)
    return FederatedLoop(runner, InProcess(runner), federation, EvalSettings(every=1), initial)


def outcome(found: FederatedLoop) -> tuple[list[RoundRecord], torch.Tensor]:
    records = [replace(record, seconds={}) for record in found.rounds()]
    return records, found.state.weights


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TOYS)
class TestTraining:
    def test_it_learns(self, name: str, method: str) -> None:
        records, _ = outcome(loop(TOYS[name], METHODS[method]()))
        losses = [record.loss for record in records]
        assert losses[-1] < losses[0]
        for scores in records[-1].scores.values():
            assert {*scores} == {*METRICS[TOYS[name].numbers]}
            assert all(np.isfinite(spread.mean) and spread.clients == CLIENTS for spread in scores.values())

    def test_bytes_are_exact_and_flops_known_or_blank(self, name: str, method: str) -> None:
        toy, found = TOYS[name], loop(TOYS[name], METHODS[method](), wire="fp32")
        records, _ = outcome(found)
        space, costs = found.state.runner.setup.space, records[0].costs
        sizes = [size - size // 2 for size in space.sizes] if method == "fedspa" else space.sizes
        assert costs.down_bytes == costs.up_bytes == 4 * CLIENTS * sum(sizes)
        assert costs.encoded_bytes >= costs.traffic_bytes
        assert (costs.train_flops is None) == (costs.flops is None) == bool(toy.uncounted)
        assert (records[-1].dense_costs.flops is None) == bool(toy.uncounted)

    def test_a_run_that_goes_on_is_the_one_that_was_not_broken_off(self, name: str, method: str) -> None:
        whole, weights = outcome(loop(TOYS[name], METHODS[method]()))
        first = loop(TOYS[name], METHODS[method]())
        next(first.rounds())
        second = loop(TOYS[name], METHODS[method]())
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        rest, end = outcome(second)
        assert torch.equal(end, weights) and rest == whole[1:]

    def test_the_compiled_engine_takes_the_same_steps(self, name: str, method: str) -> None:
        records, weights = outcome(loop(TOYS[name], METHODS[method]()))
        others, end = outcome(loop(TOYS[name], METHODS[method](), engine_of=compiled))
        assert torch.allclose(end, weights, rtol=0, atol=1e-12)
        for record, other in zip(records, others, strict=True):
            assert other.loss == pytest.approx(record.loss, abs=1e-12) and other.costs == record.costs
            for kind, scores in record.scores.items():
                for metric, spread in scores.items():
                    assert other.scores[kind][metric].mean == pytest.approx(spread.mean, abs=1e-10)


class TestMasks:
    @pytest.mark.parametrize("name", ["gru", "attention"])
    def test_they_cover_the_embedding_and_move(self, name: str) -> None:
        found = loop(TOYS[name], METHODS["fedspa"]())
        first = found.state.mask(0)
        outcome(found)
        space, last = found.state.runner.setup.space, found.state.mask(0)
        pieces = dict(space.items(last.unpack(like=found.state.weights)))
        before = dict(space.items(first.unpack(like=found.state.weights)))
        layers = {"gru": ["gru.weight_ih_l0", "gru.weight_hh_l0"], "attention": ["attention.in_proj_weight"]}
        for tensor in ("embedding.weight", *layers[name]):
            assert int(pieces[tensor].sum()) == pieces[tensor].numel() // 2
            assert not torch.equal(pieces[tensor], before[tensor])

    @pytest.mark.parametrize("name", ["gru", "attention"])
    def test_masked_weights_stay_zero_and_the_others_move(self, name: str) -> None:
        train = TOYS[name].examples(EACH, 0, torch.float64)
        engine = eager_engine(TOYS[name], train, TrainingSettings(batch_size=4, lr=0.1, weight_decay=0.1))
        mask = (torch.arange(engine.space.total) % 2).double()
        start = engine.weights * mask
        task = LocalTask(
            weights=start,
            rows=torch.arange(EACH),
            epochs=2,
            learning_rate=0.1,
            generator=torch.Generator().manual_seed(0),
            mask=mask,
        )
        trained = engine.train(task).weights
        assert not trained[mask == 0].any()
        moved = dict(engine.space.items(trained - start))
        assert all(tensor.any() for tensor in moved.values())


class TestRegression:
    def test_one_round_by_hand(self) -> None:
        """FedAvg with one step of all rows on y = w x + b, in NumPy: the mean of the clients' steps."""
        x = np.arange(6, dtype=np.float64).reshape(6, 1) / 3
        y = np.array([0.5, 1.0, -1.0, 2.0, 0.0, 3.0])
        weight, bias, lr = 0.25, -0.5, 0.1
        network = nn.Linear(1, 1)
        with torch.no_grad():
            network.weight.fill_(weight)
            network.bias.fill_(bias)
        examples = Arrays(torch.from_numpy(x), torch.from_numpy(y), "cpu", torch.float64)
        toy = Toy(regression, lambda: network, (1,), numbers=True)
        training = TrainingSettings(
            epochs=1, batch_size=2, lr=lr, lr_decay=1.0, clip_norm=None, momentum=0, weight_decay=0
        )
        found = loop(toy, FedAvg(name="fedavg"), training=training, network=network, each=2, train=examples)
        record = next(found.rounds())

        errors = (weight * x[:, 0] + bias - y).reshape(3, 2)
        inputs = x.reshape(3, 2)
        weights = weight - lr * (2 * errors * inputs).mean(1)
        biases = bias - lr * (2 * errors).mean(1)
        assert found.state.weights.tolist() == pytest.approx([weights.mean(), biases.mean()], abs=1e-15)
        assert record.loss == pytest.approx((errors**2).mean(), abs=1e-15)
        tested = (weights.mean() * x[:, 0] + biases.mean() - y).reshape(3, 2)
        scores = record.scores["global"]
        assert scores["mse"].mean == pytest.approx((tested**2).mean(), abs=1e-14)
        assert scores["mae"].mean == pytest.approx(np.abs(tested).mean(), abs=1e-14)
        local = (weights[:, None] * inputs + biases[:, None] - y.reshape(3, 2)) ** 2
        assert record.scores["local"]["mse"].mean == pytest.approx(local.mean(), abs=1e-14)

    def test_what_fills_a_batch_up_has_no_part_in_the_loss(self) -> None:
        toy = TOYS["regression"]
        engine = eager_engine(toy, toy.examples(EACH, 0, torch.float64), TrainingSettings())
        part = torch.tensor([[3], [5], [-1], [-1]])
        full = engine.module.training_step(engine.examples.planned(part[:2]))
        filled = engine.module.training_step(engine.examples.filled_up(part))
        full_gradient, gradient = (
            torch.autograd.grad(loss, list(engine.module.network.parameters())) for loss in (full, filled)
        )
        assert filled.item() == pytest.approx(full.item(), abs=1e-15)
        assert all(torch.allclose(one, two) for one, two in zip(full_gradient, gradient, strict=True))

    def test_a_network_with_another_number_of_outputs_is_refused(self) -> None:
        toy = replace(TOYS["regression"], network=lambda: Mlp(1))
        with pytest.raises(UserError, match=r"\(4, 1\).*\(4, 2\)"):
            next(loop(toy, FedAvg(name="fedavg")).rounds())

    def test_errors_are_means_over_each_clients_own_examples(self) -> None:
        target = torch.tensor([[[1.0], [2.0]], [[3.0], [float("nan")]]])
        predicted = torch.tensor([[[1.0], [4.0]], [[0.0], [9.0]]])
        assert MeanSquaredError(name="mse")(predicted, target, 0).tolist() == [2, 9]
        assert MeanAbsoluteError(name="mae")(predicted, target, 0).tolist() == [1, 3]
        assert not MeanSquaredError.higher_is_better and Accuracy.higher_is_better

    def test_it_has_no_accuracy(self) -> None:
        toy = TOYS["regression"]
        engine = eager_engine(toy, toy.examples(EACH, 0, torch.float64), TrainingSettings())
        with pytest.raises(UserError, match="accuracy"):
            engine.accuracy(engine.weights, torch.arange(EACH))


class TestOblongImages:
    def test_augmentation_moves_rows_and_columns_by_their_own_lengths(self) -> None:
        """Against the picture padded, cut, mirrored and blanked by NumPy."""
        padding, hole = 2, 3
        rng = np.random.default_rng(0)
        images = rng.integers(1, 256, size=(4, 2, 6, 10)).astype(np.uint8)
        set_ = ArraySet(torch.from_numpy(images), torch.zeros(4, dtype=torch.int64))
        augmentation = Augmentation(crop_padding=padding, flip=True, cutout=hole)
        pixels = Pixels(set_, [0.0], [1 / 255], augmentation, "cpu", torch.float64)
        rows = torch.arange(4).repeat(30)
        draws = pixels.draw(len(rows), torch.Generator().manual_seed(1))
        assert draws is not None and draws[:, 3].max() == 5 and draws[:, 4].max() == 9
        found = pixels.batch(rows, draws).inputs.numpy()
        for image, row, (dy, dx, flip, cy, cx) in zip(found, rows.tolist(), draws.tolist(), strict=True):
            padded = np.pad(images[row], ((0, 0), (padding, padding), (padding, padding)))
            expected = padded[:, dy : dy + 6, dx : dx + 10].astype(np.float64)
            if flip:
                expected = expected[:, :, ::-1].copy()
            top, left = cy - hole // 2, cx - hole // 2
            expected[:, max(top, 0) : top + hole, max(left, 0) : left + hole] = 0
            assert np.allclose(image, expected)

    def test_batches_are_channels_last_and_fill_ups_are_ignored(self) -> None:
        examples = TOYS["oblong"].examples(4, 0, torch.float64)
        batch = examples.filled_up(torch.tensor([[1, 0, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0]]))
        assert batch.inputs.shape == (2, 1, 6, 10) == examples.empty_inputs(2).shape
        assert batch.targets[1] == IGNORED != batch.targets[0]


class TestCosts:
    @pytest.mark.parametrize("name", TOYS)
    def test_layers_that_cannot_be_counted_are_named(self, name: str) -> None:
        toy = TOYS[name]
        costs = toy.costs(toy.network())
        assert costs.uncounted == toy.uncounted
        assert all(layer in costs.remark for layer in toy.uncounted)
        assert bool(costs.remark) == bool(toy.uncounted) == (costs.forward_flops() is None)
        assert costs.value_bytes() == 4 * sum(p.numel() for p in toy.network().parameters())

    def test_lookups_of_an_embedding_are_free(self) -> None:
        network = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(3 * 4, 2))
        costs = NetworkCosts.of(network, (3,), input_dtype=torch.int64)
        assert costs.forward_flops() == 2 * 24 + 2 and not costs.uncounted

    def test_sums_over_what_is_not_known_are_not_known(self) -> None:
        blank, known = Costs(train_flops=None, up_bytes=3), Costs(train_flops=5, search_flops=1, up_bytes=4)
        assert blank + known == Costs(train_flops=None, search_flops=1, up_bytes=7)
        assert (blank + known).flops is None and (known + known).flops == 12
        assert blank * 2 == Costs(train_flops=None, up_bytes=6)
        assert show_flops(None) == show_saved(None, None) == "-"
