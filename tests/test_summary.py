"""The summary, where rounds are missing what it is made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from tracking_runs import faulty_records, run_info, run_record, spread

from fedspa.core.records import Costs
from fedspa.runs.experiment import run
from fedspa.tracking.measures import density_text
from fedspa.tracking.summary import History


def info(tmp_path: Path):
    return run_info(tmp_path, federation={"wire": None})


def test_rounds_without_participants_leave_no_gap(tmp_path):
    history = History([30.0], final_rounds=2)
    for record in faulty_records():
        history.add(record)
    summary = history.summary(info(tmp_path), {}, total_seconds=1.5)
    assert summary["events"] == {"dropout": 3, "late": 1, "empty_round": 1}
    assert summary["accuracy"]["global"]["mean"] == 31.5  # of rounds 1 and 2
    assert summary["rounds_to_accuracy"]["global"] == {"30": 1}
    assert summary["samples_per_s"] == pytest.approx(1000 / 1.5)


def test_a_run_in_which_nobody_ever_took_part_has_no_accuracy(tmp_path):
    history = History([30.0], final_rounds=2)
    history.add(faulty_records()[-1])
    summary = history.summary(info(tmp_path), {}, total_seconds=1.5)
    assert set(summary["accuracy"].values()) == {None}
    assert summary["samples_per_s"] == 0


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
    assert summary["density"] == {
        "asked": asked, "mean": pytest.approx(np.mean(measured)), "min": min(measured), "max": max(measured),
    }  # fmt: skip
    assert measured and max(measured) < 1


def test_dense_models_have_a_density_of_one(plan, tmp_path):
    summary = run(plan("method=fedavg", *SMALL), tmp_path)
    assert summary["density"] == {"asked": 1, "mean": 1, "min": 1, "max": 1}


def test_where_nobody_was_visited_no_density_is_measured(plan, tmp_path):
    summary = run(plan("faults.dropout=1", *SMALL), tmp_path)
    assert summary["density"] == {"asked": 0.5}
    assert density_text(summary["density"]) == "none"


def test_final_scores_are_means_over_the_last_tested_rounds_by_every_metric(tmp_path):
    history = History([], final_rounds=2, metrics=("accuracy", "macro_f1"))
    for round, (accuracy, f1) in enumerate([(10, 1), (20, 2), (40, 6)], start=1):
        scores = {"global": {"accuracy": spread(accuracy), "macro_f1": spread(f1)}}
        history.add(replace(run_record(round), scores=scores, total_costs=Costs(), dense_costs=Costs()))
    summary = history.summary(info(tmp_path), {"accuracy": spread(50), "macro_f1": spread(7)}, 1.0)
    assert summary["final_rounds"] == 2
    assert summary["accuracy"]["global"]["mean"] == 30 and summary["accuracy"]["finetuned"]["mean"] == 50
    assert summary["metrics"]["macro_f1"]["global"]["mean"] == 4
    assert summary["metrics"]["macro_f1"]["finetuned"]["mean"] == 7
    assert summary["metrics"]["macro_f1"]["local"] is None
    again = History([], final_rounds=2, metrics=("accuracy", "macro_f1"))
    again.load_state_dict(history.state_dict())
    assert again.summary(info(tmp_path), {}, 1.0)["metrics"]["macro_f1"]["global"]["mean"] == 4
