"""Testing clients' models: who is tested on what, how often a model runs, and how scores are summed up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from federations import engine, pack, pixels, random_images
from torch import nn

from fedspa.data.source import ImageSet
from fedspa.evaluation import Evaluator, spread
from fedspa.masks.packed import PackedMask
from fedspa.methods.ditto import Ditto
from fedspa.methods.fedspa import FedSpa
from fedspa.metrics.accuracy import Accuracy
from fedspa.records import Spread
from fedspa.settings import TrainingSettings

METRICS = {"accuracy": Accuracy(name="accuracy")}
FEDSPA = FedSpa(name="fedspa")


# Spread --------------------------------------------------------------------------------------------------


def test_spread_by_hand():
    # Ten clients with 10, 20, ..., 100: their variance is 10 (1^2 + ... + 10^2) - 55^2 = 3850 - 3025 = 825.
    # The 10th percentile lies 0.1 x 9 = 0.9 of the way from the first to the second.
    scores = np.array([30, 100, 10, 50, 40, 60, 20, 70, 90, 80.0])
    assert spread(scores) == Spread(
        mean=55, std=pytest.approx(math.sqrt(825)), p10=19, worst_decile=10, min=10, max=100, clients=10
    )


def test_the_worst_decile_is_rounded_up_to_whole_clients():
    scores = np.arange(11.0)  # a tenth of 11 clients: the two worst
    assert spread(scores).worst_decile == 0.5 and spread(scores).p10 == 1


def test_clients_without_a_score_do_not_count():
    nan = math.nan
    assert spread(np.array([nan, 60, nan, 20])) == Spread(
        mean=40, std=20, p10=24, worst_decile=20, min=20, max=60, clients=2
    )
    one = spread(np.array([nan, 75]))
    assert one == Spread(mean=75, std=0, p10=75, worst_decile=75, min=75, max=75, clients=1)


# Who is tested on what -----------------------------------------------------------------------------------

# One-pixel pictures and a network of two classes with a bias each: the weights (u, v, a, b) score a picture
# of brightness x as (u x + a, v x + b). With u = a = b = 0 it says 1 where v x > 0.
BRIGHT, DARK = 255, 0  # +1 and -1 to the network
SIGN = torch.tensor([0, 1.0, 0, 0], dtype=torch.float64)  # bright is 1, dark is 0
PICTURES = torch.tensor([BRIGHT, BRIGHT, DARK, DARK, BRIGHT, DARK], dtype=torch.uint8).view(6, 1, 1, 1)
TEST = ImageSet(PICTURES, torch.tensor([1, 0, 0, 0, 1, 1]))
ROWS = [np.array([0, 1, 2, 3]), np.array([5]), np.array([1, 4])]  # sizes 4, 1 and 2; row 1 is tested twice


def evaluator(calls: list[int] | None = None) -> Evaluator:
    """Of three clients; `calls` receives the number of images of each run of a model."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(1, 2))
    runner = engine(network, pixels(TEST, mean=0.5, std=0.5), TrainingSettings())
    predict = runner.predict

    def counted(weights, images, rows, batch_size):
        if calls is not None:
            calls.append(len(rows))
        return predict(weights, images, rows, batch_size)

    runner.predict = counted
    return Evaluator(runner, pixels(TEST, mean=0.5, std=0.5), ROWS, METRICS, classes=2, batch_size=4)


def test_one_model_by_hand():
    # Right on rows 0, 2, 3 and 4, wrong on 1 and 5.
    assert evaluator().one(SIGN, [0, 1, 2])["accuracy"].tolist() == [75, 0, 50]
    assert evaluator().one(-SIGN, [0, 1, 2])["accuracy"].tolist() == [25, 100, 50]


def test_one_model_runs_once_over_the_union_of_the_images():
    calls: list[int] = []
    evaluator(calls).one(SIGN, [0, 1, 2])
    assert calls == [6]  # not 4 + 1 + 2
    evaluator(calls).one(SIGN, [1, 2])
    assert calls == [6, 3]


def test_clients_are_scored_in_the_order_asked_for():
    assert evaluator().one(SIGN, [2, 0])["accuracy"].tolist() == [50, 75]
    assert evaluator().one(SIGN, [1])["accuracy"].tolist() == [0]


def test_personal_models_by_hand():
    all_of_it, nothing = (
        pack([1, 1, 1, 1]),
        pack([0, 0, 0, 0]),
    )  # `nothing` says 0 always: a tie goes to the first
    calls: list[int] = []
    scores = evaluator(calls).personal(FEDSPA, SIGN, [all_of_it, nothing, nothing])
    assert scores["accuracy"].tolist() == [75, 0, 50]
    assert calls == [4, 3]  # the second model runs once for the two clients that share its mask

    ditto = Ditto(name="ditto")
    scores = evaluator(calls).personal(ditto, SIGN, [SIGN, -SIGN, SIGN])
    assert scores["accuracy"].tolist() == [75, 100, 50] and calls[2:] == [5, 1]


def test_clients_with_one_state_share_one_run():
    calls: list[int] = []
    mask = pack([1, 1, 0, 1])
    shared = evaluator(calls).personal(FEDSPA, SIGN, [mask] * 3)
    assert calls == [6]
    equal_masks = [PackedMask(mask.bits.clone(), mask.length) for _ in range(3)]
    alone = evaluator(calls).personal(FEDSPA, SIGN, equal_masks)
    assert calls[1:] == [4, 1, 2]
    assert shared["accuracy"].tolist() == alone["accuracy"].tolist()


def test_sharing_changes_no_score():
    """On a random network, images and clients of different sizes."""
    images = random_images(count=40, side=4, classes=3, seed=0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    runner = engine(network, pixels(images), TrainingSettings())
    rng = np.random.default_rng(1)
    rows = [np.sort(rng.choice(40, size, replace=False)) for size in (7, 1, 12, 30, 12)]
    evaluator = Evaluator(runner, pixels(images), rows, METRICS, classes=3, batch_size=9)
    weights = runner.weights
    together = evaluator.one(weights, range(5))["accuracy"]
    alone = [evaluator.one(weights, [k])["accuracy"][0] for k in range(5)]
    assert together.tolist() == alone
    for k, own in enumerate(rows):
        w, b = weights[:48].view(3, 16), weights[48:]
        seen = pixels(images).batch(torch.from_numpy(own), None)
        right = (seen.images.flatten(1) @ w.T + b).argmax(1) == seen.labels
        assert together[k] == pytest.approx(100 * right.double().mean().item(), rel=1e-6)
    assert together.std() > 0
