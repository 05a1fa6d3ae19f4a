"""Local training beyond plain SGD: corrections, frozen coordinates, proximal terms, personal layers; against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import CLIENTS, LRS, W0, Vector, loss_and_gradient
from federations import engine, train
from test_engines import AUGMENTED, ROWS, flat, network, uncompiled
from test_rounds_by_hand import equal, tiny_federation

from fedspa.core.client import Client, ClientUpdate, Proximal
from fedspa.core.server import ServerState
from fedspa.core.settings import TrainingSettings
from fedspa.federated.own_layers import SHARED_MODEL
from fedspa.methods.fedavg import FedAvg

CORRECTION = np.linspace(-0.3, 0.4, 15)
TRAINABLE = np.array([1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 0.0])


@dataclass(kw_only=True)
class Trains(FedAvg):
    """FedAvg whose clients train with whatever options they are given."""

    options: dict[str, Any] = field(default_factory=dict)

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        trained = client.train(client.weights, **self.options)
        return ClientUpdate(update=client.weights - trained.weights, local=trained.weights)


def sgd(w: Vector, k: int, lr: float, **terms: Any) -> Vector:
    """Two steps of client k: clip, correct, add the weight decay, momentum, step, proximal term, freeze."""
    start, velocity = w, np.zeros(15)
    trainable, moved = terms.get("trainable", np.ones(15)), terms.get("correction", np.zeros(15))
    for _ in range(2):
        gradient = trainable * loss_and_gradient(w, CLIENTS[k].x, CLIENTS[k].y)[1]
        gradient = gradient * min(1, terms.get("clip", np.inf) / (np.linalg.norm(gradient) + 1e-6))
        velocity = terms.get("momentum", 0) * velocity + gradient + moved + terms.get("decay", 0) * w
        w = w - lr * velocity
        w = w - lr * terms.get("mu", 0) * (w - start)
        w = np.where(trainable == 1, w, start)
    return w


@pytest.mark.parametrize(
    ("options", "settings", "terms"),
    [
        ({"correction": CORRECTION}, {}, {"correction": CORRECTION}),
        ({"correction": CORRECTION}, {"clip_norm": 0.2}, {"correction": CORRECTION, "clip": 0.2}),
        ({"trainable": TRAINABLE}, {}, {"trainable": TRAINABLE}),
        (
            {"trainable": TRAINABLE, "correction": CORRECTION},
            {"clip_norm": 0.2, "weight_decay": 0.3, "momentum": 0.5},
            {"trainable": TRAINABLE, "correction": CORRECTION, "clip": 0.2, "decay": 0.3, "momentum": 0.5},
        ),
        ({}, {"proximal": 0.7}, {"mu": 0.7}),
    ],
    ids=["correction", "clipped", "frozen", "all", "proximal"],
)
def test_terms_of_local_training_by_hand(options, settings, terms):
    tensors = {name: torch.from_numpy(value) for name, value in options.items()}
    run = tiny_federation(Trains(name="trains", options=tensors), **settings)
    w = W0
    for t, _ in enumerate(run.loop.rounds()):
        ends = [sgd(w, k, LRS[t], **terms) for k in range(2)]
        for k in range(2):
            equal(run.updates[2 * t + k][1].local, ends[k])
        w = w - (3 * (w - ends[0]) + 5 * (w - ends[1])) / 8
        equal(run.weights, w)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_compiled_engine_takes_the_terms_and_forgets_them(momentum):
    training = TrainingSettings(batch_size=4, clip_norm=0.5, momentum=momentum, weight_decay=0.1)
    eager = engine(network(), AUGMENTED, training)
    other = uncompiled(engine(network(), AUGMENTED, training))
    start = flat(network()).double()
    drawn = torch.Generator().manual_seed(3)
    mask, trainable = ((torch.rand(start.shape, generator=drawn) < 0.5).double() for _ in range(2))
    correction = 0.1 * torch.randn(start.shape, generator=drawn, dtype=torch.float64)
    plain: dict[str, Any] = {}
    both = {"correction": correction, "trainable": trainable, "proximal": Proximal(start + 0.1, 0.3)}
    seen = {"mask": mask, "forward": mask * trainable}
    frozen, corrected = {"trainable": trainable}, {"correction": correction, "mask": mask}
    for options in (plain, both, frozen, seen, corrected, plain):
        ours, theirs = (
            train(
                one, start, ROWS[0], epochs=2, learning_rate=0.1,
                generator=torch.Generator().manual_seed(1), **options,
            )
            for one in (other, eager)
        )  # fmt: skip
        torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-9, atol=1e-12)
        if "trainable" in options:
            assert torch.equal(ours.weights[trainable == 0], start[trainable == 0])
            assert not torch.equal(ours.weights[trainable == 1], start[trainable == 1])
        if "forward" in options:  # what the network does not see is trained by its gradient all the same
            unseen = (mask == 1) & (trainable == 0)
            assert not torch.equal(ours.weights[unseen], start[unseen] * (1 - 0.1 * 0.1) ** 10)
        if "mask" in options:  # the correction does not reach what the mask leaves out, weight decay does
            left = (mask == 0) & (start != 0)
            shrunk = ours.weights[left] / start[left]
            torch.testing.assert_close(shrunk, shrunk[0].expand_as(shrunk), rtol=1e-9, atol=1e-12)


# Personal layers -----------------------------------------------------------------------------------------------


PARTS: dict[str, Callable[[Vector], Vector]] = {
    "all": lambda w: np.ones(15),
    "shared": lambda w: np.repeat([1.0, 0.0], [12, 3]),
    "personal": lambda w: np.repeat([0.0, 1.0], [12, 3]),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("wire", [None, "fp32"])
def test_clients_that_keep_their_biases_by_hand(part, wire):
    run = tiny_federation(Trains(name="trains", options={"trainable": part}), personal=["1.bias"], wire=wire)
    shared, biases = W0[:12], [W0[12:], W0[12:]]
    for t, record in enumerate(run.loop.rounds()):
        ends = [
            sgd(np.concatenate([shared, biases[k]]), k, LRS[t], trainable=PARTS[part](W0)) for k in range(2)
        ]
        biases = [end[12:] for end in ends]
        shared = shared - (3 * (shared - ends[0][:12]) + 5 * (shared - ends[1][:12])) / 8
        tolerance = 1e-12 if wire is None else 1e-6  # the weights travel as fp32
        np.testing.assert_allclose(run.weights.numpy(), shared, rtol=0, atol=tolerance)
        for k in range(2):
            own = run.loop.state.clients[k].tensor(SHARED_MODEL)
            np.testing.assert_allclose(own.numpy(), biases[k], rtol=0, atol=tolerance)
        # Twelve weights travel; the layer's FLOPs are 2 x 12 + 3 a sample as ever.
        assert (record.costs.down_bytes, record.costs.up_bytes) == (2 * 48, 2 * 48)
        assert record.costs.train_flops == 3 * 27 * 2 * (3 + 5)
