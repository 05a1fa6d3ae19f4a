"""The summary, where rounds are missing what it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tracking_runs import faulty_records, run_info, run_record, spread

from fedspa.core import names
from fedspa.core.records import RoundRecord, Spread
from fedspa.costs.units import show_measured_density
from fedspa.runs.experiment import run
from fedspa.tracking.run_folder import RunFolder
from fedspa.tracking.summary import summarise


def summary_of(
    folder: Path, records: Sequence[RoundRecord], metrics: Sequence[str] = ("accuracy",), **finetuned: Spread
) -> dict[str, Any]:
    """Of a run that left these rounds; the last two tested ones make its final scores."""
    info = run_info(folder, federation={"wire": None}, eval={"final_rounds": 2, "targets": [30.0, 70.0]})
    info, tracker = replace(info, metrics=tuple(metrics)), RunFolder()
    tracker.start(info)
    for record in records:
        tracker.round(record)
    return summarise(info, finetuned, total_seconds=1.5)


def test_rounds_without_participants_leave_no_gap(tmp_path):
    summary = summary_of(tmp_path, faulty_records())
    assert names.group("faults", summary) == {"dropout": 3, "late": 1, "empty_round": 1}
    assert summary["final/accuracy/global"] == 31.5  # of rounds 1 and 2
    assert summary["final/rounds_to_30/global"] == 1 and summary["final/rounds_to_70/global"] is None
    assert summary["final/samples_per_s"] == pytest.approx(1000 / 1.5)
    assert summary["cost/traffic_bytes"] == 3 * 6125 and summary["cost/traffic_dense_bytes"] == 3 * 12000


def test_a_run_in_which_nobody_ever_took_part_has_no_accuracy(tmp_path):
    summary = summary_of(tmp_path, [replace(faulty_records()[-1], round=1)])
    assert names.final_scores(summary) == {"accuracy": {}} and summary["final_rounds"] == 0
    assert summary["final/samples_per_s"] == 0


def density(summary: dict[str, Any]) -> list[float | None]:
    """As asked for, and mean, least and most as measured."""
    keys = ("density_asked", "final/density", "final/density/min", "final/density/max")
    return [summary.get(key) for key in keys]


SMALL = (
    *("dataset=digits", "federation.rounds=2", "federation.clients=4", "federation.clients_per_round=2"),
    *("training.epochs=2", "logger=none", "hardware.workers=1"),
)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("sparsity=0.8",), 0.2),
        (("mask=snip", "sparsity=0.8"), 0.2),
        (("sparsity=0.8", "layer_sparsity=uniform", "layer_sparsity.mask_scope=weights"), 0.2),
        (("method=subfedavg", "sparsity=0.5", "method.accuracy_threshold=0", "method.distance_threshold=0"), 0.5),
    ],
)  # fmt: skip
def test_the_density_of_a_run_is_that_of_its_masks(plan, tmp_path, words, asked):
    summary = run(plan(*words, *SMALL), tmp_path)
    masks = load_file(tmp_path / "masks.safetensors").values()
    parameters = sum(tensor.numel() for tensor in load_file(tmp_path / "weights.safetensors").values())
    measured = [int(np.unpackbits(mask.numpy()).sum()) / parameters for mask in masks]
    assert density(summary) == [asked, pytest.approx(np.mean(measured)), min(measured), max(measured)]
    assert measured and max(measured) < 1


def test_dense_models_have_a_density_of_one(plan, tmp_path):
    summary = run(plan("method=fedavg", *SMALL), tmp_path)
    assert density(summary) == [1, 1, 1, 1]


def test_where_nobody_was_trained_no_density_is_measured(plan, tmp_path):
    summary = run(plan("faults.dropout=1", *SMALL), tmp_path)
    assert density(summary) == [0.5, None, None, None] and show_measured_density(summary) == "none"


def test_final_scores_are_means_over_the_last_tested_rounds_by_every_metric(tmp_path):
    records = []
    for round, (accuracy, f1) in enumerate([(10, 1), (20, 2), (40, 6)], start=1):
        scores = {"global": {"accuracy": spread(accuracy), "macro_f1": spread(f1)}}
        records.append(replace(run_record(round), scores=scores))
    last = {"accuracy": spread(50), "macro_f1": spread(7)}
    summary = summary_of(tmp_path, records, ("accuracy", "macro_f1"), **last)
    assert summary["final_rounds"] == 2
    assert summary["final/accuracy/global"] == 30 and summary["final/accuracy/finetuned"] == 50
    assert summary["final/macro_f1/global"] == 4 and summary["final/macro_f1/finetuned"] == 7
    assert summary["final/accuracy/global/clients"] == 3 and "final/macro_f1/local" not in summary
