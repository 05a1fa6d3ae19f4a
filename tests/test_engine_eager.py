"""Local training is plain PyTorch: autograd, clip_grad_norm_ and SGD on a network like any other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federations import engine, pixels, random_images, train
from torch import nn

from fedspa.core.client import Proximal
from fedspa.core.settings import TrainingSettings
from fedspa.data.examples import Batch
from fedspa.models.initialise import seeded
from fedspa.models.lenet5 import LeNet5
from fedspa.training.eager import EagerEngine

IMAGES = random_images(count=24, side=16, classes=5, seed=0)
PIXELS = pixels(IMAGES)
ROWS = torch.arange(1, 23, 2)  # 11 rows: with batches of 4 the last one has 3
LR = 0.2


def lenet() -> nn.Module:
    return seeded(lambda: LeNet5(channels=1, image_size=16, classes=5), seed=0).double()


def flat(network: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(network.parameters()).detach().clone()


def lenet_engine(**training: Any) -> EagerEngine:
    return engine(lenet(), PIXELS, TrainingSettings(batch_size=4, **training))


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_mask(total: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, (total,), generator=source(seed)).double()


def batches(epochs: int, seed: int = 0) -> list[Batch]:
    """The batches that a training sees: `Pixels.epoch` has its own tests."""
    drawn = source(seed)
    return [batch for _ in range(epochs) for batch in PIXELS.epoch(ROWS, 4, drawn)]


def shaped(vector: torch.Tensor, network: nn.Module) -> Sequence[torch.Tensor]:
    """The pieces of a flat vector in the shapes of the parameters."""
    parameters = list(network.parameters())
    return [
        v.view_as(p) for v, p in zip(vector.split([p.numel() for p in parameters]), parameters, strict=True)
    ]


def plain_training(
    start: torch.Tensor,
    seen: Iterable[Batch],
    training: TrainingSettings,
    mask: torch.Tensor | None = None,
    proximal: Proximal | None = None,
) -> tuple[torch.Tensor, list[float]]:
    """The same, written as anybody would who trains one network: its end, and the loss of each step."""
    network, losses = lenet(), []
    nn.utils.vector_to_parameters(start.clone(), network.parameters())
    masks = shaped(torch.ones_like(start) if mask is None else mask, network)
    anchors = shaped(start if proximal is None else proximal.anchor, network)
    optimizer = torch.optim.SGD(
        network.parameters(), LR, momentum=training.momentum, weight_decay=training.weight_decay
    )

    def mask_gradients() -> None:
        for parameter, piece in zip(network.parameters(), masks, strict=True):
            parameter.grad.mul_(piece)

    for batch in seen:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(batch.inputs.contiguous()), batch.targets)
        loss.backward()
        if training.clip_scope == "active":
            mask_gradients()
        if training.clip_norm is not None:
            nn.utils.clip_grad_norm_(network.parameters(), training.clip_norm)
        mask_gradients()
        optimizer.step()
        if proximal is not None:
            with torch.no_grad():
                for parameter, anchor in zip(network.parameters(), anchors, strict=True):
                    parameter -= LR * proximal.strength * (parameter - anchor)
        losses.append(loss.item())
    return flat(network), losses


@pytest.mark.parametrize("masked", [False, True], ids=["dense", "masked"])
@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": None, "weight_decay": 0.0},
        {"clip_norm": 0.05},
        {"clip_norm": 0.05, "clip_scope": "active"},
        {"clip_norm": 1000.0, "weight_decay": 0.1},
        {"momentum": 0.9, "clip_norm": 0.5},
    ],
    ids=str,
)
def test_training_is_plain_torch(settings, masked):
    runner, training = lenet_engine(**settings), TrainingSettings(batch_size=4, **settings)
    mask = random_mask(runner.space.total) if masked else None
    start = runner.weights if mask is None else runner.weights * mask
    trained = train(runner, start, ROWS, epochs=2, learning_rate=LR, generator=source(), mask=mask)

    seen = batches(epochs=2)
    end, losses = plain_training(start, seen, training, mask)
    torch.testing.assert_close(trained.weights, end, rtol=0, atol=1e-12)
    assert trained.samples == 22 and [len(batch.targets) for batch in seen] == [4, 4, 3] * 2
    weighted = sum(loss * len(batch.targets) for loss, batch in zip(losses, seen, strict=True))
    assert float(trained.loss) == pytest.approx(weighted / 22, rel=1e-12)
    assert (end - start).abs().max() > 1e-3  # something was trained


@pytest.mark.parametrize("strength", [0.0, 0.5, 4.0])
def test_the_proximal_term_follows_each_step(strength):
    runner = lenet_engine()
    start, proximal = runner.weights, Proximal(runner.weights + 0.1, strength)
    trained = train(runner, start, ROWS, epochs=1, learning_rate=LR, generator=source(), proximal=proximal)
    end, _ = plain_training(start, batches(epochs=1), TrainingSettings(batch_size=4), proximal=proximal)
    torch.testing.assert_close(trained.weights, end, rtol=0, atol=1e-12)


def test_drop_last_leaves_out_the_partial_batch():
    runner = lenet_engine(drop_last=True)
    trained = train(runner, runner.weights, ROWS, epochs=2, learning_rate=LR, generator=source())
    full = [batch for batch in batches(epochs=2) if len(batch.targets) == 4]
    end, _ = plain_training(flat(lenet()), full, TrainingSettings(batch_size=4))
    assert trained.samples == 16 == TrainingSettings(batch_size=4, epochs=2, drop_last=True).samples(11)
    torch.testing.assert_close(trained.weights, end, rtol=0, atol=1e-12)


def test_weights_outside_the_mask_stay_exactly_zero():
    runner = lenet_engine(momentum=0.9, weight_decay=0.1, clip_norm=0.5)
    mask = random_mask(runner.space.total)
    start = runner.weights * mask
    trained = train(runner, start, ROWS, epochs=3, learning_rate=LR, generator=source(), mask=mask)
    assert (trained.weights[mask == 0] == 0).all()
    assert (trained.weights[mask == 1] != start[mask == 1]).all()


def test_a_training_knows_nothing_of_earlier_ones():
    """Neither velocity nor mask nor proximal term survives, and what is handed out is the caller's own."""
    runner = lenet_engine(momentum=0.9)
    start = runner.weights
    before = start.clone()

    def trained(**options: Any) -> torch.Tensor:
        return train(runner, start, ROWS, epochs=1, learning_rate=LR, generator=source(), **options).weights

    first = trained()
    kept = first.clone()
    trained(mask=random_mask(runner.space.total), proximal=Proximal(torch.zeros_like(start), 1.0))
    gradient = runner.gradient(start, ROWS, source(1))
    gradient_kept = gradient.clone()
    runner.predict(start, PIXELS, ROWS, batch_size=4)
    assert torch.equal(trained(), kept) and torch.equal(first, kept)
    assert torch.equal(gradient, gradient_kept)
    assert torch.equal(start, before)


def test_epochs_in_two_calls_see_the_batches_of_one():
    """A generator goes on where the first call left it (Sub-FedAvg stops after its first epoch)."""
    runner, drawn = lenet_engine(), source()
    half = train(runner, runner.weights, ROWS, epochs=1, learning_rate=LR, generator=drawn)
    whole = train(runner, half.weights, ROWS, epochs=1, learning_rate=LR, generator=drawn)
    start = flat(lenet())
    at_once = train(runner, start, ROWS, epochs=2, learning_rate=LR, generator=source())
    assert torch.equal(whole.weights, at_once.weights)


def test_the_dense_gradient_is_autograds_on_one_mini_batch():
    """Whatever mask the client trained with and however tight the clip."""
    runner = engine(lenet(), PIXELS, TrainingSettings(batch_size=2, clip_norm=1e-3))
    mask = random_mask(runner.space.total)
    rows = torch.tensor([3, 8, 14, 20])
    sparse = train(
        runner, runner.weights * mask, rows, epochs=1, learning_rate=LR, generator=source(), mask=mask
    ).weights
    gradient = runner.gradient(sparse, rows, source())

    network = lenet()
    nn.utils.vector_to_parameters(sparse, network.parameters())

    def autograd(pair: tuple[int, ...]) -> torch.Tensor:
        batch = PIXELS.batch(rows[list(pair)], None)
        loss = F.cross_entropy(network(batch.inputs.contiguous()), batch.targets)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))])

    matches = [
        pair
        for pair in combinations(range(4), 2)  # the mini-batch is two of the four rows
        if torch.allclose(gradient, autograd(pair), rtol=0, atol=1e-12)
    ]
    assert len(matches) == 1
    assert gradient.norm() > 1e-2 and gradient[mask == 0].abs().max() > 1e-3
    few = runner.gradient(sparse, rows[:1], source())  # a client smaller than a batch gives all it has
    torch.testing.assert_close(few, autograd((0,)), rtol=0, atol=1e-12)


def test_predict_is_the_argmax_of_the_network_in_evaluation_mode():
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.9), nn.Linear(256, 5)).double()
    runner = engine(network, PIXELS, TrainingSettings(batch_size=4))
    weights = torch.randn(runner.space.total, dtype=torch.float64, generator=source())
    rows = torch.tensor([7, 2, 2, 19, 0, 11, 5])
    w, b = weights[:-5].view(5, 256), weights[-5:]
    expected = [int((w @ PIXELS.batch(row.view(1), None).inputs.flatten() + b).argmax()) for row in rows]
    for batch_size in (1, 3, 100):
        assert runner.predict(weights, PIXELS, rows, batch_size).tolist() == expected

    right = sum(int(IMAGES.targets[row]) == guess for row, guess in zip(rows, expected, strict=True))
    assert runner.accuracy(weights, rows) == right / 7


def test_dropout_depends_on_the_generator_alone():
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, 5)).double()
    runner = engine(network, PIXELS, TrainingSettings(batch_size=4))
    start = runner.weights

    def end(seed: int) -> torch.Tensor:
        torch.rand(seed + 3)  # other draws of the process in between
        return train(runner, start, ROWS, epochs=2, learning_rate=LR, generator=source(seed)).weights

    def gradient(seed: int) -> torch.Tensor:
        torch.rand(seed + 3)
        return runner.gradient(start, ROWS, source(seed))

    for run in (end, gradient):
        assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
