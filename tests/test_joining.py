"""Ranks that look for each other: who is missing, lacks its device or is asked to end keeps nobody waiting."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_runs import End, run_in_ranks
from test_resume import TINY

from fedspa.config.plan import Plan
from fedspa.core.errors import UserError
from fedspa.core.launch import Launch
from fedspa.runs import rank_group
from fedspa.runs.interruption import Preempted
from fedspa.runs.rank_group import joined
from fedspa.training.hardware import Hardware

PLANS = Callable[..., Plan]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[int, Any]]:
    """`start(1)`: a process that joins as rank 1 of 2: its id, and the pipe on which it tells what it met with."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    context = multiprocessing.get_context("fork")

    def live(rank: int, link: Any) -> None:
        try:
            with joined(Launch("torchrun", rank, 2, 2)) as group:
                link.send(group.from_first(lambda: f"met {group.rank}"))
                group.wait()
        except BaseException as error:
            link.send(error)

    def start(rank: int) -> tuple[int, Any]:
        here, there = context.Pipe()
        process = context.Process(target=live, args=(rank, there), daemon=True)
        process.start()
        there.close()
        return process.pid or 0, here

    return start


def told(link: Any) -> Any:
    assert link.poll(60), "it waits for ever"
    return link.recv()


def test_ranks_meet_whoever_comes_first(start: Callable[[int], tuple[int, Any]]) -> None:
    _, second = start(1)
    time.sleep(0.3)
    _, first = start(0)
    assert told(first) == told(second) == "met 0"


@pytest.mark.parametrize("rank", [0, 1])
def test_whoever_came_says_that_another_did_not(
    start: Callable[[int], tuple[int, Any]], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(rank_group, "PATIENCE", timedelta(seconds=0.6))
    _, link = start(rank)
    with pytest.raises(
        UserError, match=rf"Rank {rank} of 2 did not find all others at 127.0.0.1:\d+ within 0.01 min"
    ):
        raise told(link)


def test_a_signal_ends_the_waiting(start: Callable[[int], tuple[int, Any]]) -> None:
    pid, link = start(0)
    time.sleep(0.5)
    os.kill(pid, signal.SIGTERM)
    assert isinstance(told(link), Preempted)


def by_rank(monkeypatch: pytest.MonkeyPatch, second: Callable[[], Any]) -> None:
    """Have `Hardware.fabric` be another thing on the second rank."""
    original = Hardware.fabric

    def fabric(self: Hardware, launch: Launch) -> Any:
        return second() if launch.rank else original(self, launch)

    monkeypatch.setattr(Hardware, "fabric", fabric)


def test_a_rank_that_lacks_its_gpu_ends_all_with_a_sentence(
    plan: PLANS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise UserError("no GPU here")

    by_rank(monkeypatch, none)
    assert run_in_ranks(plan(*TINY), tmp_path) == [End(2, "no GPU here")] * 2


def test_ranks_on_devices_of_several_kinds_are_refused(
    plan: PLANS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_rank(monkeypatch, lambda: SimpleNamespace(device=torch.device("meta")))
    first, second = run_in_ranks(plan(*TINY), tmp_path)
    assert first == second and first.code == 2
    assert "finds different devices on the ranks (rank 0: cpu, rank 1: meta)" in first.reason


def test_too_few_gpus_are_told_with_the_machine(plan: PLANS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    wanted = plan("hardware.accelerator=gpu").hardware
    with pytest.raises(UserError, match=f"2 processes on {socket.gethostname()}, where torch sees 1 GPUs"):
        wanted.fabric(Launch("torchrun", 1, 2, 2))


@pytest.mark.parametrize(("seen", "device"), [(1, 0), (4, 3)])
def test_a_task_of_slurm_takes_the_one_gpu_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, seen: int, device: int
) -> None:
    """Bound to each task it is number 0, whatever the task's rank; among all of a machine it has the rank's number."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(
        "lightning.fabric.Fabric", lambda **given: made.update(given) or SimpleNamespace(launch=lambda: None)
    )
    monkeypatch.setenv("SLURM_LOCALID", "3")
    Hardware(name="here").fabric(Launch("slurm", 3, 4, 4))
    strategy, (environment,) = made["strategy"], made["plugins"]
    strategy.cluster_environment = environment
    assert strategy.num_processes == 4 and strategy.root_device == torch.device("cuda", device)
    assert made["accelerator"] == "cuda" and made["devices"] == list(range(seen))


def test_a_mac_computes_on_its_cpu(monkeypatch: pytest.MonkeyPatch, plan: PLANS) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Hardware(name="auto").fabric().device.type == "cpu"
    with pytest.raises(UserError, match=r"hardware.accelerator=gpu finds no GPU with CUDA here: .* \(MPS\)"):
        Hardware(name="gpu", accelerator="gpu").fabric()
    with pytest.raises(UserError, match=r"hardware.accelerator=mps does not work: .* use hardware=cpu"):
        plan("hardware.accelerator=mps")
