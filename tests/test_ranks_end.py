"""Runs in several ranks that are killed, asked to end, or fail in one of them: they end as one, and go on as one."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kill_points import die
from rank_runs import End, run_in_ranks
from test_resume import TINY, files, rows, saved_round

from fedspa.config.plan import Plan
from fedspa.core.errors import UserError
from fedspa.runs.experiment import run
from fedspa.tracking.fanout import Trackers

TWO = (*TINY, "hardware.workers=1", "checkpoint.every=1", "save.local=true", "theory.every=1")
FAULTS = (
    "faults.dropout=0.3",
    "faults.corruption=0.3",
    "federation.wire=fp32",
    "federation.clients_per_round=4",
)
ENDED_WELL = [End(0, "")] * 2


def lost(end: End) -> bool:
    return end.code == 2 and "Another process of this run ended early" in end.reason


@pytest.fixture(scope="module")
def whole() -> dict[tuple[str, ...], Any]:
    return {}


@pytest.fixture
def expected(
    plan: Callable[..., Plan], whole: dict[tuple[str, ...], Any], tmp_path: Path
) -> Callable[..., Any]:
    """`expected("seed=1")`: the files that such a run in one process leaves; it is made once."""

    def expected(*words: str) -> Any:
        if words not in whole:
            run(plan(*TWO, *words), tmp_path / "whole")
            whole[words] = files(tmp_path / "whole")
        return whole[words]

    return expected


@pytest.mark.parametrize(
    ("rank", "point", "number"), [(1, "training", 9), (0, "bytes", 3), (None, "merge", 2)]
)
def test_killed_ranks_go_on_to_the_same_bytes(plan, tmp_path, expected, rank, point, number):
    two = plan(*TWO)
    ends = run_in_ranks(two, tmp_path / "run", die, rank=rank, point=point, number=number)
    for place, end in enumerate(ends):
        assert end.code == -signal.SIGKILL if rank in (place, None) else lost(end)
    assert run_in_ranks(two, tmp_path / "run") == ENDED_WELL
    assert files(tmp_path / "run") == expected()


def test_faults_leave_the_same_events_in_ranks(plan, tmp_path, expected):
    assert run_in_ranks(plan(*TWO, *FAULTS), tmp_path / "run") == ENDED_WELL
    assert files(tmp_path / "run") == expected(*FAULTS)
    assert len({row.split(",")[2] for row in rows(tmp_path / "run", "events.csv")}) > 1


@pytest.mark.parametrize(
    ("rank", "number", "code", "point"),
    [
        (0, signal.SIGTERM, 75, "training"),
        (1, signal.SIGUSR1, 75, "aggregation"),
        (1, signal.SIGINT, 130, "training"),
    ],
)
def test_a_signal_to_one_rank_ends_all(plan, tmp_path, expected, rank, number, code, point):
    def ask() -> None:
        os.kill(os.getpid(), number)

    two, folder = plan(*TWO, "checkpoint.every=9"), tmp_path / "run"
    ends = run_in_ranks(two, folder, ask, rank=rank, point=point, number=5)
    assert [end.code for end in ends] == [code] * 2 and len({end.reason for end in ends}) == 1
    assert 0 < len(rows(folder)) == saved_round(folder) < 4
    assert run_in_ranks(two, folder) == ENDED_WELL
    assert files(folder) == {**expected(), "config.yaml": (folder / "config.yaml").read_bytes()}


def no_room() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_memory() -> None:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory")


def bug() -> None:
    raise ZeroDivisionError("what")


NO_ROOM = (1, "OSError: [Errno 28] No space left on device")
NO_MEMORY = (2, "There is too little memory")
BUG = (1, "ZeroDivisionError: what")


@pytest.mark.parametrize(
    ("rank", "point", "fail", "told"),
    [
        (0, "training", no_memory, NO_MEMORY),
        (1, "training", bug, BUG),
        (0, "aggregation", no_room, NO_ROOM),
        (1, "aggregation", no_memory, NO_MEMORY),
        (1, "merge", no_room, NO_ROOM),
        (1, "testing", bug, BUG),
    ],
)
def test_what_one_rank_fails_at_ends_all_with_its_reason(plan, tmp_path, rank, point, fail, told):
    ends = run_in_ranks(plan(*TWO, "checkpoint.every=9"), tmp_path, fail, rank=rank, point=point, number=4)
    assert ends[0] == ends[1]
    assert ends[0].code == told[0] and ends[0].reason.startswith(told[1])
    assert len(rows(tmp_path)) == saved_round(tmp_path)


def test_a_tracker_that_fails_ends_all(plan, tmp_path, monkeypatch):
    def fail(self: Trackers, record: object) -> None:
        if self._started:  # of the first rank
            raise UserError("the tracker cannot go on")

    monkeypatch.setattr(Trackers, "round", fail)
    assert run_in_ranks(plan(*TWO), tmp_path) == [End(2, "the tracker cannot go on")] * 2


def test_a_first_checkpoint_that_fails_ends_all(plan, tmp_path):
    ends = run_in_ranks(plan(*TWO), tmp_path, no_room, point="bytes")
    assert [end.code for end in ends] == [1, 1] and "No space left" in ends[1].reason
