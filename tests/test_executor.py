"""Worker processes: outcomes in order, no file held for each state, failures told, no orphans."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fedspa.errors import UserError
from fedspa.executor import InProcess, Workers
from fedspa.masks.packed import PackedMask
from fedspa.methods.base import Visit
from fedspa.records import Costs
from fedspa.visitor import Call, Outcome

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forks on Linux")
TOTAL = 100


class ToyVisitor:
    """A visit adds the client's number to the weights; the larger the client, the longer it takes."""

    client_rows = [np.arange(10 - client % 10) for client in range(100)]

    def perform(self, call: Call, weights: torch.Tensor) -> Outcome:
        time.sleep(0.002 * len(self.client_rows[call.client]))
        if call.client == 98:
            os.kill(os.getpid(), signal.SIGKILL)
        if call.client == 99:
            raise UserError("client 99 cannot be visited")
        local = weights + call.client
        visit = Visit(
            update=weights - local,
            holds=local,
            state=PackedMask.pack(local > 3),
            local=local,
            loss=0.5,
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


def test_a_worker_that_dies_is_told_by_its_exit_code(workers):
    with pytest.raises(RuntimeError, match="exit code -9"):
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
