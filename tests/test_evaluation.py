"""Testing clients' models: who is tested on what, how often a model runs, and how scores are summed up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from archives import pack, unpack
from federations import Federation, engine, pixels, random_images, small
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.records import Spread
from fedspa.core.server import ServerState
from fedspa.core.settings import TrainingSettings
from fedspa.data.pixels import Augmentation, Pixels
from fedspa.data.sets import ArraySet
from fedspa.federated.client_runner import ClientRunner
from fedspa.federated.evaluation import (
    Evaluator,
    Model,
    PredictionBatch,
    predict_all,
    score_models,
    scored,
    spreads,
)
from fedspa.federated.executor import InProcess
from fedspa.federated.jobs import Job
from fedspa.federated.scores import ClientScores, Kept
from fedspa.masks.dst import DST
from fedspa.masks.rsm import RSM
from fedspa.methods.ditto import Ditto
from fedspa.methods.fedavg import FedAvg
from fedspa.methods.fedspa import FedSpa
from fedspa.metrics.accuracy import Accuracy
from fedspa.training.base import Engine
from fedspa.training.eager import EagerEngine

METRICS = {"accuracy": Accuracy(name="accuracy")}


# Spread --------------------------------------------------------------------------------------------------


def scores_of(*values: float) -> ClientScores:
    return ClientScores().updated(range(len(values)), np.array(values, dtype=float))


def test_spread_by_hand():
    # Ten clients with 10, 20, ..., 100: their variance is 10 (1^2 + ... + 10^2) - 55^2 = 3850 - 3025 = 825.
    # The 10th percentile lies 0.1 x 9 = 0.9 of the way from the first to the second.
    assert scores_of(30, 100, 10, 50, 40, 60, 20, 70, 90, 80).spread() == Spread(
        mean=55, std=pytest.approx(math.sqrt(825)), p10=19, worst_decile=10, min=10, max=100, clients=10
    )


def test_the_worst_decile_is_rounded_up_to_whole_clients():
    spread = scores_of(*range(11)).spread()  # a tenth of 11 clients: the two worst
    assert spread.worst_decile == 0.5 and spread.p10 == 1


def test_clients_without_a_score_do_not_count():
    few = ClientScores().updated([9, 1], np.array([60.0, 20.0]))
    expected = Spread(mean=40, std=20, p10=24, worst_decile=20, min=20, max=60, clients=2)
    assert few.spread() == expected
    assert scores_of(math.nan, 60, math.nan, 20).spread() == expected  # a metric may have nothing to say
    one = ClientScores().updated([3], np.array([75.0])).spread()
    assert one == Spread(mean=75, std=0, p10=75, worst_decile=75, min=75, max=75, clients=1)


def test_a_spread_over_images_by_hand():
    # Clients with 1, 3 and 6 test images and 100, 50 and 0 percent: 100, 50, 50, 50, 0, 0, 0, 0, 0, 0.
    # Their mean is 25, their variance (75^2 + 3 x 25^2 + 6 x 25^2) / 10 = 1125; the worst tenth is one image.
    spread = scores_of(100, 50, 0).spread(np.array([1, 3, 6]))
    assert spread == Spread(
        mean=25, std=pytest.approx(math.sqrt(1125)), p10=0, worst_decile=0, min=0, max=100, clients=3
    )
    # One client without a score, the others with 2 and 18 images: the worst two images are those of the first.
    spread = scores_of(10, math.nan, 60).spread(np.array([2, 5, 18]))
    assert (spread.mean, spread.worst_decile, spread.clients) == (55, 10, 2)
    assert spread.p10 == pytest.approx(
        10 + 0.9 * 50
    )  # 0.1 x 19 = 1.9: between the second image and the third
    assert scores_of(30, 100, 10).spread(np.array([7, 7, 7])).mean == pytest.approx(
        scores_of(30, 100, 10).spread().mean
    )


@given(st.lists(st.dictionaries(st.integers(0, 9), st.floats(0, 100), max_size=5), max_size=5))
def test_the_latest_score_of_a_client_counts(rounds):
    kept, expected = ClientScores(), {}
    for found in rounds:
        before = kept, kept.clients.tolist(), kept.values.tolist()
        kept = kept.updated(list(found), np.array(list(found.values())))
        expected |= found
        assert (before[0].clients.tolist(), before[0].values.tolist()) == before[1:]
    assert kept.clients.tolist() == sorted(expected)
    dense = kept.dense(10)
    assert {client: dense[client] for client in expected} == expected
    assert np.isnan(dense).sum() == 10 - len(expected)


# Who is tested on what -----------------------------------------------------------------------------------

# One-pixel pictures and a network of two classes with a bias each: the weights (u, v, a, b) score a picture
# of brightness x as (u x + a, v x + b). With u = a = b = 0 it says 1 where v x > 0.
BRIGHT, DARK = 255, 0  # +1 and -1 to the network
SIGN = torch.tensor([0, 1.0, 0, 0], dtype=torch.float64)  # bright is 1, dark is 0
PICTURES = torch.tensor([BRIGHT, BRIGHT, DARK, DARK, BRIGHT, DARK], dtype=torch.uint8).view(6, 1, 1, 1)
TEST = ArraySet(PICTURES, torch.tensor([1, 0, 0, 0, 1, 1]))
ROWS = [np.array([0, 1, 2, 3]), np.array([5]), np.array([1, 4])]  # sizes 4, 1 and 2; row 1 is tested twice


ENGINE = engine(
    nn.Sequential(nn.Flatten(), nn.Linear(1, 2)), pixels(TEST, mean=0.5, std=0.5), TrainingSettings()
)


def evaluator() -> Evaluator:
    """Of three clients."""
    return Evaluator(pixels(TEST, mean=0.5, std=0.5), ROWS, METRICS, classes=2, batch_size=4)


def test_a_metric_without_any_score_has_no_statistics():
    kept = {
        "local": {"accuracy": scores_of(math.nan, math.nan, math.nan)},
        "global": {"accuracy": scores_of(80)},
    }
    found = spreads([evaluator()], kept, "images")
    assert found["local"] == {} and found["global"]["accuracy"].mean == 80


def one(
    tester: Evaluator, weights: torch.Tensor, clients: Sequence[int], runner: Engine = ENGINE
) -> list[float]:
    """Accuracies of one model."""
    predicted = predict_all([tester], runner, weights, clients)
    return scored([tester], predicted, clients)["accuracy"].tolist()


def test_one_model_by_hand():
    # Right on rows 0, 2, 3 and 4, wrong on 1 and 5.
    assert one(evaluator(), SIGN, [0, 1, 2]) == [75, 0, 50]
    assert one(evaluator(), -SIGN, [0, 1, 2]) == [25, 100, 50]


def test_one_model_runs_once_over_the_union_of_the_images(monkeypatch):
    calls: list[int] = []
    predict = EagerEngine.predict

    def counted(self, weights, pixels, rows, batch_size):
        calls.append(len(rows))
        return predict(self, weights, pixels, rows, batch_size)

    monkeypatch.setattr(EagerEngine, "predict", counted)
    one(evaluator(), SIGN, [0, 1, 2])
    assert calls == [6]  # not 4 + 1 + 2
    one(evaluator(), SIGN, [1, 2])
    assert calls == [6, 3]


def test_clients_are_scored_in_the_order_asked_for():
    assert one(evaluator(), SIGN, [2, 0]) == [50, 75]
    assert one(evaluator(), SIGN, [1]) == [0]


def shown(runs: list[tuple[int, ...]]) -> Kept:
    """Scores of models that say 1 for bright pictures or, with a state, 0 for them; `runs` receives the rows of
    each showing. Client 2 is told the opposite by its personal model."""
    tester = evaluator()

    def run(jobs: Sequence[PredictionBatch]) -> Iterator[torch.Tensor]:
        for job in jobs:
            runs.append(tuple(job.rows.tolist()))
            model = job.model.state.tensor("weights") if job.model.state else SIGN
            yield tester.predict(ENGINE, model, job.rows)

    models = [
        (Model("global"), range(3)),
        (Model("personal", ClientState(weights=SIGN)), [3 - 1, 0]),
        (Model("personal", ClientState(weights=-SIGN)), [1]),
    ]
    return score_models([tester], models, run)


def test_models_by_hand():
    runs: list[tuple[int, ...]] = []
    scores = shown(runs)
    assert scores["global"]["accuracy"].values.tolist() == [75, 0, 50]
    assert scores["personal"]["accuracy"].values.tolist() == [75, 100, 50]
    # Each model sees an image once, in batches of four that do not depend on who is asked.
    assert runs == [(0, 1, 2, 3), (4, 5), (0, 1, 2, 3), (4,), (5,)]


def test_the_rows_of_a_client_go_to_a_device_once(monkeypatch):
    uploads: list[int] = []

    def sent(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
        uploads.append(len(rows))
        return rows  # the values, which the meta device has not

    monkeypatch.setattr("fedspa.federated.evaluation.sent", sent)
    on_meta = Pixels(TEST, [0.5], [0.5], Augmentation(), "meta", torch.float32)
    tester = Evaluator(on_meta, ROWS, METRICS, classes=2, batch_size=3)
    for _ in range(2):
        batches = [[part.tolist() for part in tester.batches([client])] for client in range(3)]
        assert batches == [[[0, 1, 2], [3]], [[5]], [[1, 4]]]
    assert uploads == [4 + 1 + 2]
    assert torch.cat(tester.batches([2, 0])).tolist() == [0, 1, 2, 3, 4] and uploads == [7, 5]


def test_several_sets_of_images_score_under_their_own_names():
    test, own = evaluator(), evaluator()
    own.metrics = {"val_accuracy": METRICS["accuracy"]}
    own._rows = [np.array([0]), np.array([1]), np.array([2])]

    def run(jobs: Sequence[PredictionBatch]) -> list[torch.Tensor]:
        return [(test, own)[job.evaluator].predict(ENGINE, SIGN, job.rows) for job in jobs]

    scores = score_models([test, own], [(Model("global"), range(3))], run)
    assert scores["global"]["accuracy"].values.tolist() == [75, 0, 50]
    assert scores["global"]["val_accuracy"].values.tolist() == [100, 0, 100]


class Listening(InProcess):
    """Keeps the jobs that it is given, apart from updates."""

    def run(self, jobs: Sequence[Job], server: ServerState) -> Iterator[Any]:
        self.predictions = [job for job in jobs if isinstance(job, PredictionBatch)]
        return super().run(jobs, server)


@pytest.mark.parametrize(
    ("method", "searcher", "models"),
    [
        (FedSpa(name="fedspa"), RSM(name="rsm"), [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (FedSpa(name="fedspa"), DST(name="dst", anneal_rounds=9), [[0, 1, 2, 3], [1, 2], [0], [3]]),
        (Ditto(name="ditto"), None, [[0, 1, 2, 3], [1, 2], [0], [3]]),
        (FedAvg(name="fedavg"), None, [[0, 1, 2, 3]]),
    ],
    ids=["rsm", "dst", "ditto", "fedavg"],
)
def test_a_round_shows_each_image_once_to_each_different_model(method, searcher, models):
    made: list[Listening] = []

    def listening(runner: ClientRunner) -> Listening:
        made.append(Listening(runner))
        return made[0]

    (record,) = small(method, searcher, rounds=1, executor=listening).run()
    assert set(record.participants) == {0, 3}  # the others still share the first state
    # Client k is tested on images 4 k to 4 k + 3, in batches of 8.
    rows = [np.concatenate([np.arange(4 * k, 4 * k + 4) for k in clients]) for clients in models]
    batches = [row.tolist() for union in rows for row in np.split(union, range(8, len(union), 8))]
    assert sorted(job.rows.tolist() for job in made[0].predictions) == sorted(batches)


def test_a_personal_model_that_nobody_has_changed_keeps_its_score_also_after_a_break():
    made: list[Listening] = []

    def listening(runner: ClientRunner) -> Listening:
        made.append(Listening(runner))
        return made[-1]

    def ditto() -> Federation:
        return small(Ditto(name="ditto"), rounds=4, executor=listening)

    class Anew(Ditto):
        personal_is_own = False

    whole, again = ditto(), small(Anew(name="ditto"), rounds=4)
    for number, (record, same) in enumerate(zip(whole.loop.rounds(), again.loop.rounds(), strict=True)):
        assert record.scores == same.scores
        shown = {
            client
            for job in made[0].predictions
            if job.model.kind == "personal"
            for client in (job.rows // 4).tolist()
        }
        assert shown == (set(record.participants) if number else {0, 1, 2, 3})
        if number == 1:
            broken = ditto()
            broken.loop.load_state_dict(unpack(pack(whole.loop.state_dict())))
    resumed = broken.run()
    shown = {
        client
        for job in made[1].predictions
        if job.model.kind == "personal"
        for client in (job.rows // 4).tolist()
    }
    assert shown == set(resumed[-1].participants)
    assert resumed[-1].scores == record.scores


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (torch.tensor(0.5).double(), r"odd returned float64 \[\]: it must return one score for each client"),
        (torch.zeros(2, 4), r"odd returned float32 \[2, 4\]: it must .*, here float64 \[2\]\.$"),
        (torch.zeros(2, dtype=torch.complex64), r"odd returned complex64 \[2\]: "),
        (0.5, "odd returned float: "),
    ],
)
def test_a_metric_that_does_not_score_each_client_is_refused(monkeypatch, result, told):
    monkeypatch.setattr(Accuracy, "__call__", lambda *_: result)
    tester = Evaluator(pixels(TEST), ROWS, {"odd": Accuracy(name="odd")}, classes=2, batch_size=4)
    with pytest.raises(UserError, match=told):
        scored([tester], predict_all([tester], ENGINE, SIGN, [0, 2]), [0, 2])


def test_sharing_changes_no_score():
    """On a random network, images and clients of different sizes."""
    images = random_images(count=40, side=4, classes=3, seed=0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    runner = engine(network, pixels(images), TrainingSettings())
    rng = np.random.default_rng(1)
    rows = [np.sort(rng.choice(40, size, replace=False)) for size in (7, 1, 12, 30, 12)]
    evaluator = Evaluator(pixels(images), rows, METRICS, classes=3, batch_size=9)
    weights = runner.weights
    together = one(evaluator, weights, range(5), runner=runner)
    assert together == [one(evaluator, weights, [k], runner=runner)[0] for k in range(5)]
    for k, own in enumerate(rows):
        w, b = weights[:48].view(3, 16), weights[48:]
        seen = pixels(images).batch(torch.from_numpy(own), None)
        right = (seen.inputs.flatten(1) @ w.T + b).argmax(1) == seen.targets
        assert together[k] == pytest.approx(100 * right.double().mean().item(), rel=1e-6)
    assert np.std(together) > 0
