"""Whole runs, from a plan to its summary."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from fedspa.core import names
from fedspa.core.errors import UserError
from fedspa.runs.experiment import run

SHORT = ("federation.rounds=1", "federation.clients_per_round=2", "logger=none", "hardware.workers=1")


@pytest.mark.parametrize(("method", "has_global"), [("fedavg", True), ("local", False)])
def test_only_a_global_model_is_finetuned(plan, tmp_path, method, has_global):
    summary = run(plan(f"method={method}", "finetune.epochs=1", *SHORT), tmp_path / "run")
    assert ("final/accuracy/global" in summary) is has_global
    assert ("final/accuracy/finetuned" in summary) is has_global


def test_means_over_images_weigh_each_client_by_its_test_images(plan, tmp_path):
    sizes, start = [2, 10, 40, 100], np.arange(4) * 60
    rows = {
        "train_rows": [list(range(first, first + 60)) for first in start.tolist()],
        "test_rows": [list(range(size)) for size in sizes],
    }
    (tmp_path / "partition.json").write_text(json.dumps(rows))
    settings = (
        *("method=fedavg", "mask=none", "finetune.epochs=1", "federation.clients=4", "partition=file"),
        *(f"partition.path={tmp_path}/partition.json", "dataset.val_fraction=0.5", "training.lr=0.5"),
        *("federation.rounds=3", "federation.clients_per_round=4", "logger=none", "hardware.workers=1"),
    )
    by_client = run(plan(*settings), tmp_path / "clients")
    by_image = run(plan(*settings, "eval.weighting=images"), tmp_path / "images")
    with (tmp_path / "images/clients.csv").open() as file:
        clients = list(csv.DictReader(file))
    assert [int(row["test_size"]) for row in clients] == sizes
    kinds = ["global", "local", "finetuned"]
    assert [*names.final_scores(by_image)["accuracy"]] == kinds
    for kind in kinds:
        scores = np.array([float(row[f"accuracy/{kind}"]) for row in clients])
        mean = (scores * sizes).sum() / sum(sizes)
        assert by_image[f"final/accuracy/{kind}"] == pytest.approx(mean)
        assert by_image[f"final/accuracy/{kind}/std"] == pytest.approx(
            np.sqrt(((scores - mean) ** 2 * sizes).sum() / 152)
        )
        assert by_client[f"final/accuracy/{kind}"] == pytest.approx(scores.mean())
        assert by_image[f"final/accuracy/{kind}/clients"] == 4
    assert names.group("client_tests", by_image) == {"asked": None, "smallest": 2, "median": 25.0, "fewer": 0}


def test_a_run_says_how_many_clients_have_fewer_test_images_than_asked_for(plan, tmp_path, capsys):
    settings = (*SHORT, "partition.gamma=0.1", "dataset.test_rows=50", "federation.clients=10")
    with pytest.raises(
        UserError, match="gets .* where dataset.client_test_images=30 and dataset.least_test_share=0.5"
    ):
        run(plan(*settings), tmp_path / "refused")
    run(plan(*settings, "dataset.least_test_share=0"), tmp_path / "run")
    with (tmp_path / "run/clients.csv").open() as file:
        sizes = sorted(int(row["test_size"]) for row in csv.DictReader(file))
    fewer = sum(size < 30 for size in sizes)
    median = (sizes[4] + sizes[5]) / 2
    tests = names.group("client_tests", json.loads((tmp_path / "run/summary.json").read_text()))
    assert tests == {"asked": 30, "smallest": sizes[0], "median": median, "fewer": fewer}
    assert sizes[0] < 15 and fewer > 5
    line = f"smallest number {sizes[0]}, median {median:g}; {fewer} of 10 clients have fewer than the 30 asked for"
    assert line in capsys.readouterr().out
