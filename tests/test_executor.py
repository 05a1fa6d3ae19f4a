"""Worker processes: results in order, no file held for each state, failures told, no orphans."""

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

from fedspa.core.client import ClientUpdate
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.packed_mask import PackedMask
from fedspa.core.records import Costs
from fedspa.core.server import ServerState
from fedspa.federated.jobs import CompletedUpdate, UpdateJob
from fedspa.runs import workers as executor
from fedspa.runs.pickling import pack
from fedspa.runs.workers import Workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forks on Linux")
TOTAL = 100


class Unportable(Exception):
    """Cannot be unpickled: its arguments are not those of its constructor."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class ToyRunner:
    """An update adds the client's number to the weights; the larger the client, the longer it takes."""

    client_rows = [np.arange(10 - client % 10) for client in range(100)]

    def work(self, job: UpdateJob) -> int:
        return len(self.client_rows[job.client])

    def perform(self, job: UpdateJob, server: ServerState) -> CompletedUpdate:
        time.sleep(0.002 * self.work(job))
        if job.client == 98:
            os.kill(os.getpid(), signal.SIGKILL)
        if job.client == 99:
            raise UserError("client 99 cannot be updated")
        if job.client == 97:
            raise Unportable(1, 2)
        local = server.weights + job.client
        update = ClientUpdate(
            update=server.weights - local,
            mask=local,
            tensors={"sum": server["sum"] + local},
            state=ClientState(mask=PackedMask.pack(local > 3), local=local),
            local=local,
        )
        scores = {"accuracy": np.array([1.0])}
        return CompletedUpdate(update, torch.tensor(0.5), 1, Costs(), {"train": 0.1}, scores)


def server_of(weights: torch.Tensor) -> ServerState:
    """With a further tensor of another shape and dtype."""
    return ServerState(weights, {"sum": weights[:1].double()})


ZEROS = server_of(torch.zeros(TOTAL))


def job(client: int) -> UpdateJob:
    return UpdateJob(round=0, client=client, first=True, state=torch.arange(TOTAL, dtype=torch.uint8))


@pytest.fixture
def workers():
    made = Workers(ToyRunner(), 3, ZEROS)
    yield made
    made.close()


def test_results_are_those_of_one_process_in_the_order_of_the_jobs(workers):
    weights = torch.randn(TOTAL)
    jobs = [job(client) for client in (3, 9, 0, 1, 7)]
    for _ in range(2):
        alone = [ToyRunner().perform(each, server_of(weights)) for each in jobs]
        for one, other in zip(alone, workers.run(jobs, server_of(weights)), strict=True):
            assert torch.equal(one.update.local, other.update.local)
            assert torch.equal(one.update.update, other.update.update)
            assert torch.equal(one.update.tensors["sum"], other.update.tensors["sum"])
            assert one.update.state == other.update.state
            assert one.local_scores == other.local_scores
        weights = weights + 1


def test_states_hold_no_open_files(workers):
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, kept = open_files(), []
    for client in range(10):
        sent = [job(client) for _ in range(4)]
        kept += sent, list(workers.run(sent, ZEROS))
    assert open_files() == before


def test_an_error_comes_with_the_place_where_it_was_raised(workers):
    with pytest.raises(UserError, match="client 99 cannot be updated") as caught:
        list(workers.run([job(1), job(99)], ZEROS))
    assert "in perform" in caught.value.__notes__[0]


def test_an_error_that_cannot_travel_is_told_all_the_same(workers):
    with pytest.raises(RuntimeError, match="Unportable: 1 and 2") as caught:
        list(workers.run([job(97)], ZEROS))
    assert "in perform" in caught.value.__notes__[0]


def test_the_first_error_in_the_order_of_the_jobs_is_raised_in_its_turn(workers):
    jobs = [job(1), job(0), job(97), job(99)]  # 99 has a row, 97 three: it ends first
    done = []
    with pytest.raises(RuntimeError, match="Unportable"):
        for result in workers.run(jobs, ZEROS):
            done.append(result.update.local[0].item())
    assert done == [1, 0]


def test_workers_can_be_used_after_a_round_that_was_given_up(workers):
    for _ in range(3):
        with pytest.raises(UserError):
            list(workers.run([job(99), job(0), job(1), job(2), job(3)], ZEROS))
        begun = workers.run([job(0), job(1), job(2), job(3)], ZEROS)
        next(begun)
        begun.close()
        results = workers.run([job(4), job(5)], server_of(torch.ones(TOTAL)))
        assert [result.update.local[0].item() for result in results] == [5, 6]


def test_a_worker_that_dies_is_told_in_a_sentence(workers):
    with pytest.raises(UserError, match=r"worker process died .* hardware.workers=3"):
        list(workers.run([job(98)], ZEROS))


def test_workers_end_with_a_parent_that_is_killed():
    here, there = multiprocessing.Pipe()

    def parent() -> None:
        made = Workers(ToyRunner(), 2, ZEROS)
        list(made.run([job(0)], ZEROS))
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


def test_results_that_wait_for_their_turn_are_few(monkeypatch, workers):
    """Job 0, the smallest, would begin last: all other results would wait for it."""
    monkeypatch.setattr(executor, "AHEAD", 4)
    begun = []
    monkeypatch.setattr(executor, "pack", lambda job: begun.append(job.client) or pack(job))
    clients = [9, *range(8), *range(8)]
    for place, result in enumerate(workers.run([job(c) for c in clients], ZEROS)):
        assert result.update.local[0] == clients[place]
        assert len(begun) <= place + 4
    assert sorted(begun) == sorted(clients)
