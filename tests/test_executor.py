"""Worker processes: outcomes in order, no file held for each state, failures told, no orphans."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedspa.client_state import ClientState
from fedspa.errors import UserError
from fedspa.masks.packed import PackedMask
from fedspa.methods.base import Visit
from fedspa.records import Costs
from fedspa.rounds.visitor import Call, Outcome
from fedspa.running import executor
from fedspa.running.executor import InProcess, Workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forks on Linux")
TOTAL = 100


class Unportable(Exception):
    """Cannot be unpickled: its arguments are not those of its constructor."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class ToyVisitor:
    """A visit adds the client's number to the weights; the larger the client, the longer it takes."""

    client_rows = [np.arange(10 - client % 10) for client in range(100)]

    def __init__(self, together: int | None = 1) -> None:
        self.engine = SimpleNamespace(clients_at_once=together)
        self.asked: list[int] = []

    def work(self, call: Call) -> int:
        return len(self.client_rows[call.client])

    def perform(self, calls: Sequence[Call], weights: torch.Tensor) -> list[Outcome]:
        self.asked.append(len(calls))
        return [self.visit(call, weights) for call in calls]

    def visit(self, call: Call, weights: torch.Tensor) -> Outcome:
        time.sleep(0.002 * self.work(call))
        if call.client == 98:
            os.kill(os.getpid(), signal.SIGKILL)
        if call.client == 99:
            raise UserError("client 99 cannot be visited")
        if call.client == 97:
            raise Unportable(1, 2)
        local = weights + call.client
        visit = Visit(
            update=weights - local,
            holds=local,
            state=ClientState(mask=PackedMask.pack(local > 3), local=local),
            local=local,
            loss=torch.tensor(0.5),
            samples=1,
            costs=Costs(),
        )
        return Outcome(visit, {"accuracy": np.array([1.0])}, {"train": 0.1})


def call(client: int) -> Call:
    return Call(round=0, client=client, first_visit=True, state=torch.arange(TOTAL, dtype=torch.uint8))


@pytest.fixture
def workers():
    made = Workers(ToyVisitor(), 3, TOTAL, torch.float32)
    yield made
    made.close()


def test_outcomes_are_those_of_one_process_in_the_order_of_the_calls(workers):
    weights = torch.randn(TOTAL)
    calls = [call(client) for client in (3, 9, 0, 1, 7)]
    for _ in range(2):
        alone = InProcess(ToyVisitor()).run(calls, weights)
        for one, other in zip(alone, workers.run(calls, weights), strict=True):
            assert torch.equal(one.visit.local, other.visit.local)
            assert torch.equal(one.visit.update, other.visit.update)
            assert one.visit.state == other.visit.state
            assert one.local_scores == other.local_scores
        weights = weights + 1


@pytest.mark.parametrize(("together", "asked"), [(1, [1] * 5), (2, [2, 2, 1]), (None, [5])])
def test_a_process_advances_as_many_visits_together_as_the_engine_can(together, asked):
    visitor = ToyVisitor(together)
    outcomes = list(InProcess(visitor).run([call(client) for client in range(5)], torch.zeros(TOTAL)))
    assert [int(outcome.visit.local[0]) for outcome in outcomes] == [0, 1, 2, 3, 4]
    assert visitor.asked == asked


def test_states_hold_no_open_files(workers):
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, kept = open_files(), []
    for client in range(10):
        sent = [call(client) for _ in range(4)]
        kept += sent, list(workers.run(sent, torch.zeros(TOTAL)))
    assert open_files() == before


def test_an_error_comes_with_the_place_where_it_was_raised(workers):
    with pytest.raises(UserError, match="client 99 cannot be visited") as caught:
        list(workers.run([call(1), call(99)], torch.zeros(TOTAL)))
    assert "in perform" in caught.value.__notes__[0]


def test_an_error_that_cannot_travel_is_told_all_the_same(workers):
    with pytest.raises(RuntimeError, match="Unportable: 1 and 2") as caught:
        list(workers.run([call(97)], torch.zeros(TOTAL)))
    assert "in perform" in caught.value.__notes__[0]


def test_the_first_error_in_the_order_of_the_calls_is_raised_in_its_turn(workers):
    calls = [call(1), call(0), call(97), call(99)]  # 99 has a row, 97 three: it ends first
    done = []
    with pytest.raises(RuntimeError, match="Unportable"):
        for outcome in workers.run(calls, torch.zeros(TOTAL)):
            done.append(outcome.visit.local[0].item())
    assert done == [1, 0]


def test_workers_can_be_used_after_a_round_that_was_given_up(workers):
    for _ in range(3):
        with pytest.raises(UserError):
            list(workers.run([call(99), call(0), call(1), call(2), call(3)], torch.zeros(TOTAL)))
        begun = workers.run([call(0), call(1), call(2), call(3)], torch.zeros(TOTAL))
        next(begun)
        begun.close()
        outcomes = workers.run([call(4), call(5)], torch.ones(TOTAL))
        assert [outcome.visit.local[0].item() for outcome in outcomes] == [5, 6]


def test_a_worker_that_dies_is_told_in_a_sentence(workers):
    with pytest.raises(UserError, match=r"ended .* \(killed by SIGKILL\).* hardware.workers=3"):
        list(workers.run([call(98)], torch.zeros(TOTAL)))


def test_workers_end_with_a_parent_that_is_killed():
    here, there = multiprocessing.Pipe()

    def parent() -> None:
        made = Workers(ToyVisitor(), 2, TOTAL, torch.float32)
        list(made.run([call(0)], torch.zeros(TOTAL)))
        there.send([process.pid for process in made._processes])
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=parent)
    process.start()
    left = here.recv()
    process.join()
    deadline = time.monotonic() + 5
    while (left := [pid for pid in left if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_answers_that_wait_for_their_turn_are_few(monkeypatch, workers):
    """Job 0, the smallest, would be begun last: all other answers would wait for it."""
    monkeypatch.setattr(executor, "AHEAD", 4)
    waiting, most = 0, 0
    receive = workers._receive

    def counted(link):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        return receive(link)

    monkeypatch.setattr(workers, "_receive", counted)
    clients = [9, *range(8), *range(8)]
    for client, outcome in zip(
        clients, workers.run([call(c) for c in clients], torch.zeros(TOTAL)), strict=True
    ):
        waiting -= 1
        assert outcome.visit.local[0] == client
    assert most <= 4 and waiting == 0
