"""dataset=table and dataset=text: features, numbers to predict and tokens, from files to whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from fedspa.checkpoints.run_state import RunState
from fedspa.config.network import build_model
from fedspa.config.plan import Plan, check
from fedspa.core import names
from fedspa.core.errors import UserError
from fedspa.core.records import Spread
from fedspa.data.features import Features
from fedspa.data.sets import ArraySet
from fedspa.data.text import Text
from fedspa.export.formats import as_torch
from fedspa.export.stored_run import StoredRun
from fedspa.partition.clients import client_rows
from fedspa.runs import experiment
from fedspa.studies.results import outcome

Planner = Callable[..., Plan]
SHORT = (
    *("federation.clients=3", "federation.clients_per_round=3", "federation.rounds=3", "training.epochs=2"),
    *("logger=none", "hardware=cpu", "hardware.workers=1", "engine=eager", "seed=1"),
)
TWO = ("federation.clients=2", "federation.clients_per_round=2")
METHODS = {"dst": ("method=fedspa", "mask=dst", "sparsity=0.3"), "fedavg": ("method=fedavg",)}


@pytest.fixture(scope="module")
def cancer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Breast cancer, 569 rows of 30 numbers, with a category that is made of one of them."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer(as_frame=True)
    frame = data.frame.assign(target=data.target_names[data.target])
    frame["size"] = np.where(frame["mean radius"] > 14, "large", "small")
    frame.to_csv(file := tmp_path_factory.mktemp("tables") / "cancer.csv", index=False)
    return file


@pytest.fixture(scope="module")
def diabetes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Diabetes, 442 rows of 10 numbers and one to predict, from three clinics."""
    from sklearn.datasets import load_diabetes

    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame["clinic"] = [f"c{row % 3}" for row in range(len(frame))]
    frame.to_csv(file := tmp_path_factory.mktemp("tables") / "diabetes.csv", index=False)
    return file


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three speakers with a few words each."""
    rng = np.random.default_rng(0)
    words = {"ann": ("cat", "mat", "sat"), "bob": ("dog", "log", "fog"), "eve": ("sea", "pea", "tea")}
    said = [(who, " ".join(rng.choice(own, 5))) for who, own in words.items() for _ in range(10)]
    pd.DataFrame(said, columns=["speaker", "text"]).to_csv(
        file := tmp_path_factory.mktemp("text") / "talk.csv", index=False
    )
    return file


def table(plan: Planner, path: Path, *more: str) -> Plan:
    return plan("dataset=table", f"dataset.path={path}", *SHORT, *more)


def trained(made: Plan, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    return experiment.run(made, folder, quiet=True)


def test_numbers_are_standardised_and_categories_spread(plan: Planner, cancer: Path) -> None:
    source = table(plan, cancer, "dataset.label=target").dataset
    assert isinstance(source, Features)
    assert (source.inputs, source.classes, source.task) == (32, 2, "classification")
    assert (source.train_size, source.test_size) == (456, 113)
    data, frame = source.load(), pd.read_csv(cancer)
    assert data.class_names == ("benign", "malignant")
    train = data.train.inputs  # type: ignore[union-attr]
    assert torch.allclose(train[:, :30].mean(0), torch.zeros(30), atol=1e-5)
    assert torch.allclose(train[:, :30].std(0, correction=0), torch.ones(30), atol=1e-4)
    assert train[:, 30:].sum(1).tolist() == [1.0] * 456
    rows = np.flatnonzero(~source._held_out)
    radius = frame["mean radius"].to_numpy()[rows]
    by_hand = (radius - radius.mean()) / radius.std()
    assert np.allclose(train[:, 0], by_hand, atol=1e-5)
    assert np.array_equal(train[:, 30] == 1, frame["size"].to_numpy()[rows] == "large")
    test = data.test.inputs[:, 0].numpy()  # type: ignore[union-attr]  # by the statistics of the training rows
    held = frame["mean radius"].to_numpy()[source._held_out]
    assert np.allclose(test, (held - radius.mean()) / radius.std(), atol=1e-5)


def test_splits_in_files_and_other_kinds_of_tables(plan: Planner, cancer: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(cancer)
    frame[:400].to_parquet(tmp_path / "train-0.parquet")
    frame[400:].to_json(tmp_path / "test.jsonl", orient="records", lines=True)
    source = table(plan, tmp_path, "dataset.label=target", "dataset.columns=[mean radius,size]").dataset
    assert (source.train_size, source.test_size, source.inputs) == (400, 169, 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "overrides", "sentence"),
    [
        (None, ["dataset.label=targte"], "dataset.label=targte is no column of .*did you mean target"),
        (
            None,
            [],
            "more than one column that could be meant: set dataset.label to mean radius or .* or another of 32",
        ),
        (
            None,
            ["dataset.label=target", "dataset.columns=[siez]"],
            "dataset.columns=siez is no column of .*size",
        ),
        (None, ["dataset.label=target", "metric=[mse]"], "metric=mse compares numbers, but .* classes"),
        (
            None,
            ["dataset.label=target", "model=lenet5"],
            "model=lenet5 needs channels, which dataset=changed.csv does not have",
        ),
        (None, ["dataset.label=target", "dataset.task=regression"], "is no column of numbers of"),
        (("size", 3, None), ["dataset.label=target"], r"row 3 \(from 0\): the column size is empty there"),
        (
            ("mean radius", 5, None),
            ["dataset.label=target"],
            r"row 5 .*: the column mean radius has no number",
        ),
        (
            ("target", 7, None),
            ["dataset.label=target"],
            r"row 7 \(from 0\): the column target is empty there",
        ),
        (
            ("target", slice(None), "a"),
            ["dataset.label=target"],
            "has one class only, a: two or more are needed",
        ),
    ],
)
def test_mistakes_in_tables_are_one_sentence(
    plan: Planner, cancer: Path, tmp_path: Path, change: Any, overrides: list[str], sentence: str
) -> None:
    frame = pd.read_csv(cancer)
    if change:
        column, row, value = change
        frame.loc[row, column] = value
    frame.to_csv(tmp_path / "changed.csv", index=False)
    with pytest.raises(UserError, match=sentence) as refusal:
        made = table(plan, tmp_path / "changed.csv", *overrides)
        build_model(made)
        made.dataset.load()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", ["", "a,b\n1", "\x00\x01", "a\n"])
def test_a_file_that_is_no_table_is_told(plan: Planner, tmp_path: Path, content: str) -> None:
    (tmp_path / "odd.csv").write_text(content)
    with pytest.raises(UserError) as refusal:
        table(plan, tmp_path / "odd.csv", "dataset.label=b").dataset.load()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_on_features(plan: Planner, cancer: Path, tmp_path: Path, method: str) -> None:
    made = table(plan, cancer, "dataset.label=target", *METHODS[method])
    summary = trained(made, tmp_path / "run")
    assert summary["final/accuracy/global"] > 88
    assert summary["cost/flops"] > 0 and summary["metrics"] == ["accuracy"]
    again = check(OmegaConf.load(tmp_path / "run/config.yaml"))
    assert again.config_hash == summary["config_hash"] and again.dataset.load().hash == summary["data_hash"]


@pytest.mark.parametrize("method", ["subfedavg", "lotteryfl"])
def test_a_method_that_needs_accuracies_refuses_a_regression(
    plan: Planner, diabetes: Path, method: str
) -> None:
    with pytest.raises(UserError, match=f"method={method} decides by the accuracy .* numbers"):
        table(plan, diabetes, "dataset.label=target", f"method={method}")


@pytest.mark.parametrize("method", METHODS)
def test_a_run_of_a_regression(plan: Planner, diabetes: Path, tmp_path: Path, method: str) -> None:
    by_clinic = (
        "partition=column",
        "partition.column=clinic",
        "dataset.val_fraction=0.2",
        "training.lr=0.05",
        "checkpoint.every=1",
    )
    made = table(
        plan, diabetes, "dataset.label=target", *by_clinic, *METHODS[method], "eval.targets=[0.9,0.0]"
    )
    assert list(made.metrics) == ["mse", "mae"] and made.main_metric == "mse"
    assert made.dataset.outputs == 1 and made.dataset.is_regression
    summary = trained(made, tmp_path / "run")
    assert 0.3 < summary["final/mse/global"] < 0.9  # 1 is the variance of the targets
    assert summary["metrics"] == ["mse", "mae", "val_mse", "val_mae"] and not summary["in_percent"]
    assert summary["final/rounds_to_0.9/global"] in (1, 2, 3) and summary["final/rounds_to_0/global"] is None
    assert summary["final/mse/global/worst_decile"] == summary["final/mse/global/max"]
    rounds = pd.read_csv(tmp_path / "run/rounds.csv")
    assert (rounds["val_mse/local"].to_numpy() > 0).all()
    # By hand: the network of the run on the rows of client 0.
    module = StoredRun(tmp_path / "run").model("global", None).module
    data = made.dataset.load()
    own = client_rows(data, made.dataset, made.partition, 3, 1).test
    errors = [(module(data.test.inputs[rows]) - data.test.targets[rows]).square().mean() for rows in own]  # type: ignore[union-attr]
    assert float(torch.stack(errors).mean()) == pytest.approx(summary["final/mse/global"], rel=1e-4)
    assert names.main_metric(summary) == "mse" and names.is_error(summary, "val_mae")
    assert names.unit(summary) == "" and "%" not in outcome(tmp_path / "run")


def test_the_best_checkpoint_is_that_of_the_lowest_error() -> None:
    state = RunState({}, "d", "p", {}, lower_is_better=("mse", "val_mse"))
    spread = Spread(mean=0.4, std=0, p10=0, worst_decile=0, min=0, max=0, clients=1)
    for scores, selected in (
        ({"mse": spread, "val_mse": spread}, -0.4),
        ({"val_r2": spread}, 0.4),
        ({"mse": spread}, None),
    ):
        record = SimpleNamespace(scores={"global": scores})
        assert state._selection_score(record) == selected  # type: ignore[arg-type]


def test_targets_of_several_columns_and_their_units(plan: Planner, diabetes: Path) -> None:
    made = table(plan, diabetes, "dataset.label=[target,bmi]")
    data, frame = made.dataset.load(), pd.read_csv(diabetes)
    assert made.dataset.outputs == 2
    assert made.dataset.input_shape == (9 + 3,)  # clinic is a category of three
    assert data.train.targets.shape == (len(data.train), 2)  # type: ignore[union-attr]
    assert data.train.targets.mean(0).abs().max() < 1e-5  # type: ignore[union-attr]
    spread = frame["target"].to_numpy()[~made.dataset._held_out].std()  # type: ignore[attr-defined]
    assert f"target {spread:.4g}" in made.dataset.remarks[-1]
    assert build_model(made)(made.dataset.blank(4)).shape == (4, 2)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["partition=dirichlet"],
            "partition=dirichlet deals by the classes of the rows, .* numbers: use partition=iid",
        ),
        (["partition=shards"], "partition=shards deals by the classes"),
        (
            ["metric=[accuracy,mse]"],
            "metric=accuracy compares classes, but the targets of dataset=.* are numbers",
        ),
        (
            ["method=subfedavg"],
            "method=subfedavg decides by the accuracy on a client.s rows, but the targets",
        ),
    ],
)
def test_what_needs_classes_is_refused_for_a_regression(
    plan: Planner, diabetes: Path, tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        trained(table(plan, diabetes, "dataset.label=target", *overrides), tmp_path / "run")


def test_clients_of_a_regression_are_tested_on_rows_of_all(plan: Planner, diabetes: Path) -> None:
    made = table(plan, diabetes, "dataset.label=target", "dataset.client_test_images=20")
    rows = client_rows(made.dataset.load(), made.dataset, made.partition, 3, 1)
    assert [len(own) for own in rows.test] == [20, 20, 20]


# ---- text


def text(plan: Planner, path: Path, *more: str) -> Plan:
    return plan("dataset=text", f"dataset.path={path}", "dataset.length=6", *SHORT, *more)


def test_each_character_is_predicted_from_those_before_it(plan: Planner, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(b"\xef\xbb\xbfabca\r\n\r\nbb\r\n")  # as Windows writes it
    (tmp_path / "test.txt").write_text("cxb\n")
    source = plan("dataset=text", f"dataset.path={tmp_path}", "dataset.length=2", *TWO).dataset
    assert isinstance(source, Text)
    assert (source.vocabulary, source.classes, source.train_size, source.test_size) == (4, 4, 4, 2)
    data = source.load()
    assert isinstance(data.train, ArraySet) and isinstance(data.test, ArraySet)
    assert data.train.inputs.tolist() == [[0, 1], [1, 2], [2, 3], [0, 2]]
    assert data.train.targets.tolist() == [2, 3, 1, 2]
    assert data.test.inputs.tolist() == [[0, 3], [3, 0]] and data.test.targets.tolist() == [0, 2]
    assert data.class_names == ("", "a", "b", "c")
    fewer = plan("dataset=text", f"dataset.path={tmp_path}", "dataset.length=2", "dataset.stride=2", *TWO)
    assert fewer.dataset.load().train.targets.tolist() == [2, 1, 2]  # type: ignore[union-attr]


def test_ids_and_labels(plan: Planner, tmp_path: Path) -> None:
    frame = pd.DataFrame({"ids": [[1, 2, 3], [4], [2, 2]], "topic": ["x", "y", "x"]})
    frame.to_parquet(tmp_path / "train.parquet")
    frame.to_parquet(tmp_path / "test.parquet")
    words = (
        "dataset=text",
        f"dataset.path={tmp_path}",
        "dataset.text=ids",
        "dataset.label=topic",
        "dataset.length=2",
    )
    source = plan(*words, *TWO).dataset
    data = source.load()
    assert (source.vocabulary, source.classes, source.train_size) == (5, 2, 3)
    assert data.train.inputs.tolist() == [[2, 3], [0, 4], [2, 2]]  # type: ignore[union-attr]
    assert data.train.targets.tolist() == [0, 1, 0] and data.class_names == ("x", "y")  # type: ignore[union-attr]
    frame["ids"] = [[1], [-4], [2]]
    frame.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"row 1 \(from 0\): the token -4 is no whole number from 0 on"):
        plan(*words, *TWO)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_with_a_client_a_speaker(plan: Planner, talk: Path, tmp_path: Path, method: str) -> None:
    by_speaker = ("partition=column", "partition.column=speaker", "model.hidden=32")
    made = text(plan, talk, *by_speaker, *METHODS[method])
    summary = trained(made, tmp_path / "run")
    rounds = pd.read_csv(tmp_path / "run/rounds.csv")
    assert rounds["train/loss"].is_monotonic_decreasing
    assert summary["final/accuracy/local"] > 30  # of 14 characters
    assert summary["cost/flops"] is None and summary["cost/traffic_bytes"] > 0
    assert json.loads((tmp_path / "run/partition.json").read_text())["names"] == ["ann", "bob", "eve"]
    model = StoredRun(tmp_path / "run").model("global", None)
    assert model.module(made.dataset.blank(2)).shape == (2, made.dataset.classes)
    assert as_torch(model).data


def test_a_missing_column_of_texts_is_told(plan: Planner, talk: Path) -> None:
    with pytest.raises(UserError, match="dataset.text=txet is no column of .*: did you mean text"):
        text(plan, talk, "dataset.text=txet")
    with pytest.raises(
        UserError,
        match="model=small_cnn needs channels, which dataset=talk.csv does not have: it takes no texts of 6",
    ):
        build_model(text(plan, talk, "model=small_cnn"))
