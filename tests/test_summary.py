"""The summary, where rounds are missing what it is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from tracking_runs import faulty_records, run_info

from fedspa.tracking.summary import History


def info(tmp_path: Path):
    return run_info(tmp_path, federation={"wire": None})


def test_rounds_without_participants_leave_no_gap(tmp_path):
    history = History([30.0], final_rounds=2)
    for record in faulty_records():
        history.add(record)
    summary = history.summary(info(tmp_path), None, total_seconds=1.5)
    assert summary["events"] == {"dropout": 3, "late": 1, "empty_round": 1}
    assert summary["accuracy"]["global"]["mean"] == 31.5  # of rounds 1 and 2
    assert summary["rounds_to_accuracy"]["global"] == {"30": 1}
    assert summary["samples_per_s"] == pytest.approx(1000 / 1.5)


def test_a_run_in_which_nobody_ever_took_part_has_no_accuracy(tmp_path):
    history = History([30.0], final_rounds=2)
    history.add(faulty_records()[-1])
    summary = history.summary(info(tmp_path), None, total_seconds=1.5)
    assert set(summary["accuracy"].values()) == {None}
    assert summary["samples_per_s"] == 0
