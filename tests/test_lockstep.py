"""Visits in lockstep: one call of the engine for all requests of a kind, and the same results as one by one."""

from __future__ import annotations

import time

import pytest
import torch
from federations import small

from fedspa.masks.dst import DST
from fedspa.methods.ditto import Ditto
from fedspa.methods.fedspa import FedSpa
from fedspa.methods.subfedavg import SubFedAvg
from fedspa.rounds.clock import Clock
from fedspa.rounds.lockstep import relayed, run_in_lockstep
from fedspa.rounds.requests import Gradient, TrainingAccuracy

NOTHING = torch.zeros(0)


class Counting:
    """Answers with how many it was asked at once, a hundredth of a second after."""

    device = torch.device("cpu")

    def __init__(self):
        self.asked = []

    def answer(self, requests):
        time.sleep(0.01)
        self.asked.append((type(requests[0]), len(requests)))
        return [len(requests)] * len(requests)


def dialogue(times, accuracy=False):
    heard = []
    for _ in range(times):
        heard.append((yield Gradient(weights=NOTHING, rows=NOTHING, generator=torch.Generator())))
    if accuracy:
        heard.append((yield TrainingAccuracy(weights=NOTHING, rows=NOTHING)))
    return heard


def test_requests_of_a_kind_are_answered_together():
    engine, clocks = Counting(), [Clock() for _ in range(4)]
    dialogues = [dialogue(2), dialogue(0), dialogue(1, accuracy=True), dialogue(3)]
    assert run_in_lockstep(dialogues, engine, clocks) == [[3, 2], [], [3, 1], [3, 2, 1]]
    assert sorted((kind.__name__, count) for kind, count in engine.asked) == [
        *(("Gradient", 1), ("Gradient", 2), ("Gradient", 3), ("TrainingAccuracy", 1))
    ]
    seconds = [clock.seconds["search"] for clock in clocks]
    assert seconds[1] == 0 and 0.01 / 3 + 0.01 / 2 < seconds[0] < seconds[2] < seconds[3]
    assert sum(seconds) == pytest.approx(0.04, rel=0.5)


def test_what_is_relayed_is_asked_and_heard_in_other_words():
    def hear(request, answer):
        assert isinstance(request, Gradient)  # what the dialogue asked, not what was asked for it
        return 10 * answer

    other = TrainingAccuracy(weights=NOTHING, rows=NOTHING)
    engine = Counting()
    (heard,) = run_in_lockstep([relayed(dialogue(2), lambda request: other, hear)], engine, [Clock()])
    assert heard == [10, 10] and engine.asked == [(TrainingAccuracy, 1)] * 2
    assert run_in_lockstep([relayed(dialogue(0), lambda request: other, hear)], engine, [Clock()]) == [[]]


def test_an_error_of_the_listener_ends_the_dialogue():
    def hear(request, answer):
        raise ArithmeticError("heard enough")

    with pytest.raises(ArithmeticError, match="heard enough"):
        run_in_lockstep([relayed(dialogue(1), lambda request: request, hear)], Counting(), [Clock()])


@pytest.mark.parametrize(
    ("method", "searcher"),
    [
        (FedSpa(name="fedspa"), DST(name="dst", anneal_rounds=3)),
        (Ditto(name="ditto"), None),
        (SubFedAvg(name="subfedavg", sparsity=0.1, accuracy_threshold=0.0), None),
    ],
    ids=["fedspa", "ditto", "subfedavg"],
)
def test_the_order_in_which_visits_advance_changes_nothing(method, searcher, monkeypatch):
    one_by_one = small(method, searcher)
    alone = one_by_one.run()
    side_by_side = small(method, searcher)
    monkeypatch.setattr(type(side_by_side.loop._visitor.engine), "clients_at_once", None)
    together = side_by_side.run()
    assert torch.equal(one_by_one.weights, side_by_side.weights)
    for one, other in zip(alone, together, strict=True):
        assert (one.loss, one.scores, one.costs) == (other.loss, other.scores, other.costs)
