"""The cost command: the paper's printed cells through the real configs, and what real runs add up to."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from costs import CostConfig, costs
from fedspa.cli import main
from fedspa.core.errors import UserError
from fedspa.planning.cost_report import CostReport
from fedspa.runs.assembly import build
from fedspa.runs.experiment import run
from fedspa.runs.memory import keep_freed_memory

torch.set_num_threads(1)
keep_freed_memory()

COMMAND = Path(__file__).parents[1] / "src" / "costs.py"
MAIN_TABLE = {  # experiment: traffic in GB and FLOPs in 1e14 of each method, as the paper prints them
    "emnist_iid": {
        "method=fedspa mask=dst": ("7.0", "2.0"),
        "method=fedspa mask=rsm": ("7.0", "2.0"),
        "method=ditto": ("14.1", "3.5"),
        "method=fedavg": ("14.1", "3.5"),
        "method=local": ("0.0", "3.5"),
        "method=subsampling": ("10.5", "3.5"),
    },
    "cifar10_iid": {
        "method=fedspa mask=dst": ("369.2", "172.9"),
        "method=fedspa mask=rsm": ("369.2", "172.9"),
        "method=ditto": ("738.5", "229.3"),
        "method=fedavg": ("738.5", "229.3"),
        "method=local": ("0.0", "229.3"),
        "method=subsampling": ("553.9", "229.3"),
    },
    "cifar100_iid": {  # FedSpa's 705.0 is printed as 705.1: a float32 accumulator, which we do not imitate
        "method=fedspa mask=dst": ("448.8", "705.0"),
        "method=fedspa mask=rsm": ("448.8", "705.0"),
        "method=ditto": ("897.6", "833.2"),
        "method=fedavg": ("897.6", "833.2"),
        "method=local": ("0.0", "833.2"),
        "method=subsampling": ("673.2", "833.2"),
    },
}
ABLATIONS = {  # traffic in GB and FLOPs in 1e16 of FedSpa (DST) on CIFAR-100 / ResNet18
    "sparsity=0.2": ("718.1", "8.2"),
    "sparsity=0.4": ("538.6", "7.6"),
    "sparsity=0.5": ("448.8", "7.1"),
    "sparsity=0.6": ("359.0", "6.5"),
    "sparsity=0.8": ("179.5", "4.6"),
    "layer_sparsity=erk": ("448.8", "7.1"),
    "layer_sparsity=uniform": ("448.8", "4.6"),
}


def cells(report: CostReport, flops_unit: int) -> tuple[str, str]:
    """Traffic and FLOPs as the paper prints them."""
    return f"{report.total.traffic_bytes / 10**9:.1f}", f"{report.total.flops / flops_unit:.1f}"


@pytest.mark.parametrize(
    ("experiment", "words", "printed"),
    [(name, words, printed) for name, rows in MAIN_TABLE.items() for words, printed in rows.items()],
)
def test_main_table(plan, experiment, words, printed):
    wanted = plan(f"experiment={experiment}", *words.split(), "costs.convention=paper")
    assert cells(CostReport.of(wanted), 10**14) == printed


@pytest.mark.parametrize(("word", "printed"), ABLATIONS.items())
def test_ablation_tables(plan, word, printed):
    wanted = plan("experiment=cifar100_iid", word, "costs.convention=paper")
    assert cells(CostReport.of(wanted), 10**16) == printed


@pytest.mark.parametrize(("experiment", "flops"), [("cifar10_iid", "161.2"), ("cifar100_iid", "662.4")])
def test_honest_rsm_pays_for_no_search_and_sends_no_masks(plan, experiment, flops):
    report = CostReport.of(plan(f"experiment={experiment}", "mask=rsm"))
    assert f"{report.total.flops / 10**14:.1f}" == flops
    assert report.total.search_flops == 0
    assert report.total.mask_bytes == 100 * 8  # the seed of the first mask, to each client once


def test_honest_dst_sends_its_masks(plan):
    report = CostReport.of(plan("experiment=cifar10_iid"))
    assert (
        report.total.mask_bytes == 9_990 * 1_105_920 + 100 * 8
    )  # none in the last round, which exchanges nothing
    assert report.total.encoded_bytes == report.total.traffic_bytes + 10_000 * 2 * (40 + 9 + 8)
    halved = CostReport.of(plan("experiment=cifar10_iid", "federation.wire=fp16")).total
    assert report.total.encoded_bytes - halved.encoded_bytes == (halved.down_bytes + halved.up_bytes) // 2


SMALL = (
    "logger=none",
    "hardware=cpu",
    "hardware.threads=1",
    "hardware.workers=1",
    "partition=iid",
    "dataset.train_rows=203",
    "dataset.val_fraction=0.1",
    "federation.clients=6",
    "federation.clients_per_round=3",
    "federation.rounds=3",
    "federation.wire=fp32",
    "training.epochs=2",
)


@pytest.mark.parametrize(
    "words",
    [
        "mask.anneal_rounds=9",
        "mask=rsm",
        "method=fedavg",
        "method=ditto method.shared_epochs=1 method.personal_epochs=1",
        "method=local",
        "method=subsampling",
    ],
)
def test_a_run_costs_what_was_told_to_the_byte(plan, words):
    wanted = plan(*SMALL, *words.split())
    federation, report = build(wanted), CostReport.of(wanted)
    *_, last = federation.loop.rounds()
    assert report.client_sizes == [len(rows) for rows in federation.rows.train]
    assert last.total_costs == report.total
    assert last.dense_costs == report.dense_total


def test_a_summary_says_what_fine_tuning_cost_beside_the_totals(plan, tmp_path):
    words = ("partition=dirichlet", "finetune.epochs=2", "training.drop_last=true", "training.batch_size=4")
    wanted = plan(*SMALL, *words, "mask=rsm", "dataset.val_fraction=0.2", "logger=none")
    summary = run(wanted, tmp_path)
    report, rows = CostReport.of(wanted), build(wanted).rows.train
    samples = sum(len(own) // 4 * 4 * 2 for own in rows)
    assert len({len(own) for own in rows}) > 1
    assert summary["cost/flops_finetune"] == 3 * report.network.forward_flops() * samples
    assert summary["cost/flops"] == summary["cost/flops_train"]
    assert report.finetune_flops == report.as_dict()["cost/flops_finetune"] > 0


@pytest.mark.parametrize("words", [("method=fedavg",), ("method=local", "finetune.epochs=5")], ids=str)
def test_without_a_global_model_or_epochs_fine_tuning_costs_nothing(plan, words):
    assert CostReport.of(plan(*words)).finetune_flops == 0


def test_what_the_figures_leave_open_is_said(plan):
    assert CostReport.of(plan("partition=iid")).notes == []
    assert CostReport.of(plan("partition=iid", "faults.dropout=0.1")).notes[0].startswith("faults: ")
    [unused] = CostReport.of(plan("partition=iid", "method=fedavg", "sparsity=0.8")).notes
    assert unused == "sparsity=0.8 is not used: method=fedavg trains dense."
    sizes, pruning = CostReport.of(plan("partition=dirichlet", "method=subfedavg")).notes
    assert "equal size" in sizes and "only known in a run" in pruning


def test_more_clients_than_images_are_refused(plan):
    with pytest.raises(UserError, match="federation.clients=30 is out of range: it must be at most 20"):
        CostReport.of(plan("dataset.train_rows=20", "federation.clients=30"))


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """`command("seed=4")`: the exit code of that command line in an empty folder, and what it prints."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.chdir(tmp_path)

    def command(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["costs.py", *words, f"hydra.run.dir={tmp_path / 'run'}"])
        return main(costs, schema=CostConfig), *capsys.readouterr()

    return command


def test_the_command_prints_json_and_nothing_else(tmp_path):
    """At this sparsity biases run empty, and the warning must not get into the JSON."""
    words = ("experiment=emnist_iid", "layer_sparsity=uniform", "sparsity=0.97", "format=json")
    line = [sys.executable, COMMAND, *words, f"hydra.run.dir={tmp_path / 'run'}"]
    shown = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    told = json.loads(shown.stdout)
    assert shown.stderr.count("without an active parameter: ") == 1
    assert told["forward_flops_dense"] == 4_617_246 and told["parameters"]["total"] == 439_096
    assert told["parameters"]["active"] == sum(tensor["active"] for tensor in told["tensors"])
    assert told["forward_flops"] == sum(tensor["flops"] for tensor in told["tensors"])
    assert told["cost/flops"] == told["cost/flops_train"] + told["cost/flops_search"]
    parts = [told[f"cost/traffic_{part}_bytes"] for part in ("down", "up", "mask")]
    assert told["cost/traffic_bytes"] == sum(parts)


def test_the_command_prints_tables_and_leaves_nothing(command, tmp_path):
    _, shown, _ = command("experiment=cifar10_iid", "method=fedspa", "sparsity=0.5")
    assert list(tmp_path.iterdir()) == []
    assert "10,000 client updates in 1,000 rounds" in shown
    assert "features.conv5.weight  512x256x3x3    747,470    0.634" in shown
    assert "in a round that searches for masks. Other" in " ".join(shown.split())  # the last one does not
    assert max(map(len, shown.splitlines())) <= 80


def test_an_unknown_format_is_refused(command):
    sentence = "Error: format=jsn is not known: did you mean json? (valid: json, table).\n"
    assert command("format=jsn") == (2, "", sentence)


def test_a_network_through_which_nothing_can_flow_is_refused(command):
    *ended, error = command("experiment=emnist_iid", "sparsity=0.99999")
    assert ended == [2, ""]
    (line,) = error.splitlines()
    assert line.startswith(
        "Error: sparsity=0.99999 with layer_sparsity=erk leaves no active parameter in conv1.weight"
    )
    assert "layer_sparsity.min_active=1" in line
