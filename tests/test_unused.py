"""Settings that would silently do less than they say: refused, or told."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedspa.config.plan import Plan
from fedspa.config.unused import LAYER_SPARSITY
from fedspa.core.errors import UserError
from fedspa.core.names import final_metrics
from fedspa.report.page import make_report, results
from fedspa.report.runs import folders_under, read_runs
from fedspa.report.study import make_study
from fedspa.runs.experiment import run

SMALL = (
    *(
        "dataset.train_rows=200",
        "federation.clients=4",
        "federation.clients_per_round=2",
        "training.epochs=1",
    ),
    *("federation.rounds=2", "logger=none", "hardware.workers=1"),
)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["method=local", "finetune.epochs=1"], ["finetune.epochs=1", "method=local"]),
        (["method=fedavg", "sparsity=0.8"], ["sparsity=0.8", "method=fedavg"]),
        (["method=subfedavg", "layer_sparsity=uniform"], ["layer_sparsity=uniform", "method=subfedavg"]),
        (["method=fedavg", "layer_sparsity.mask_scope=weights"], ["mask_scope=weights", "method=fedavg"]),
        (["method=local", "faults.loss=0.5"], ["faults.loss=0.5", "method=local"]),
        (["method=local", "federation.wire=fp16"], ["federation.wire=fp16", "method=local"]),
        (["mask=snip", "layer_sparsity=uniform"], ["layer_sparsity=uniform", "mask=snip"]),
        (["method=dispfl", "faults.norm_bound=5"], ["faults.norm_bound=5", "method=dispfl"]),
        (["method=dispfl", "faults.loss=0.5"], ["faults.loss=0.5", "method=dispfl"]),
        (["method=dispfl", "faults.deadline=1.5"], ["faults.deadline=1.5", "method=dispfl"]),
        (["method=fedmd", "faults.norm_bound=5"], ["faults.norm_bound=5", "method=fedmd"]),
        (["logger=csv", "save.upload_weights=true"], ["save.upload_weights=true", "logger=mlflow"]),
    ],
    ids=str,
)
def test_what_is_asked_for_and_not_done_is_told(
    plan: Callable[..., Plan], words: list[str], named: list[str]
) -> None:
    [sentence] = plan(*words).unused
    assert all(name in sentence for name in named)


@pytest.mark.parametrize("method", ["fedspa", "fedavg", "local", "ditto", "subfedavg", "subsampling"])
def test_defaults_that_nobody_asked_for_are_left_out_without_a_word(
    plan: Callable[..., Plan], method: str
) -> None:
    made = plan(f"method={method}")
    assert made.unused == ()
    assert made.resolved["layer_sparsity"].items() >= LAYER_SPARSITY.items()


def test_what_is_not_done_makes_no_other_experiment(plan: Callable[..., Plan]) -> None:
    usual = plan("method=local")
    assert plan("method=local", "finetune.epochs=5", "sparsity=0.2").config_hash == usual.config_hash
    assert plan("method=local", "finetune.epochs=5").resolved["finetune"] == {"epochs": 0}
    assert plan("method=fedavg", "finetune.epochs=5").resolved["finetune"] == {"epochs": 5}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["eval.final_rounds=10", "federation.rounds=2"], ["eval.final_rounds=10", "at most 2"]),
        (["eval.final_rounds=3", "eval.every=5", "federation.rounds=9"], ["eval.every=5", "at most 2"]),
        (["eval.final_rounds=2", "eval.every=50", "federation.rounds=9"], ["eval.every=50", "at most 1"]),
        (["checkpoint.every=5", "checkpoint.keep=0"], ["checkpoint.every=5", "checkpoint.keep=0"]),
        (["faults.norm_action=clip"], ["faults.norm_action=clip", "faults.norm_bound"]),
        (["faults.max_skipped=5"], ["faults.max_skipped=5", "faults.policy=skip"]),
        (
            ["training.clip_scope=active", "training.clip_norm=null"],
            ["training.clip_scope=active", "clip_norm"],
        ),
    ],
    ids=str,
)
def test_what_cannot_have_an_effect_is_refused(
    plan: Callable[..., Plan], words: list[str], named: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        plan(*words)
    assert all(name in str(refused.value) for name in named) and "\n" not in str(refused.value)


def test_the_last_round_is_always_tested(plan: Callable[..., Plan]) -> None:
    assert plan("eval.final_rounds=2", "eval.every=5", "federation.rounds=9")
    assert plan("eval.every=50", "federation.rounds=9")


def test_a_run_says_what_it_did_not_do(
    plan: Callable[..., Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("method=fedavg", "save.personal=true", "sparsity=0.8", "eval.final_rounds=2")
    words = (*words, "hardware=cpu", "hardware.precision=tf32")
    summary = run(plan(*SMALL, *words), tmp_path)
    told = capsys.readouterr().out
    assert summary["final_rounds"] == 2
    for sentence in (
        "sparsity=0.8 is not used",
        "save.personal=true kept nothing",
        "hardware.precision=tf32 computes as 32-true",
        "last 2 tested rounds",
    ):
        assert sentence in told


def test_every_metric_is_wherever_accuracy_is(
    plan: Callable[..., Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("method=fedavg", "metric=[accuracy,macro_f1]", "finetune.epochs=1", "dataset.val_fraction=0.2")
    summary = run(plan(*SMALL, *words), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert summary["metrics"] == ["accuracy", "macro_f1", "val_accuracy", "val_macro_f1"]

    with (tmp_path / "run" / "rounds.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    with (tmp_path / "run" / "clients.csv").open() as file:
        clients = list(csv.DictReader(file))
    final = final_metrics(summary)
    told = capsys.readouterr().out
    assert re.search(r"macro_f1 in %", told)
    study = make_study("study", read_runs(folders_under(tmp_path / "run")))
    tables = make_report(study).tables
    numbers = results(study, tables)
    means = numbers[numbers["quantity"] == "macro_f1"].set_index("kind")["mean"]
    [table] = [table for table in tables if table.name.startswith("macro-f1")]
    cells = dict(
        zip([column.name for column in table.columns], next(iter(table.lines.values())), strict=True)
    )
    for kind in ("global", "local", "finetuned"):
        mean = summary[f"final/macro_f1/{kind}"]
        if kind != "finetuned":
            assert mean == float(last[f"macro_f1/{kind}"])
        known = [float(row[f"macro_f1/{kind}"]) for row in clients if row[f"macro_f1/{kind}"]]
        assert mean == pytest.approx(sum(known) / len(known))
        assert final[f"final/macro_f1/{kind}"] == mean == means[kind]
        assert cells[f"{kind}, %"].text.startswith(f"{mean:.1f}")
        assert f"{mean:.2f}" in told
