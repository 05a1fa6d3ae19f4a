"""Reading runs, arranging them in a grid, and the numbers of its cells."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from report_runs import make_run

from fedspa.core import components
from fedspa.core.errors import UserError
from fedspa.core.paths import config_dir
from fedspa.report import labels, masks
from fedspa.report.page import make_report
from fedspa.report.runs import Run, folders_in_store, folders_under, read_runs, varied
from fedspa.report.study import Study, make_study
from fedspa.report.table import Cell


def study_of(root: Path) -> Study:
    return make_study("study", read_runs(folders_under(root)))


def run_of(folder: Path) -> Run:
    return read_runs({"run": folder}).runs[0]


# Reading


def test_a_run_reads_back(tmp_path: Path) -> None:
    run = run_of(make_run(tmp_path / "run", {"global": [10, 1 / 3], "local": [float("nan"), 50]}))
    assert run.curve("global").tolist() == [10, 1 / 3]
    assert run.curve("local").to_dict() == {2: 50}
    assert run.curve("personal").tolist() == []
    assert run.kinds == ("global", "local")
    assert run.settings["dataset"] == "digits"
    assert run.label_counts.tolist() == [[4, 0], [4, 0], [0, 4], [2, 2]]
    assert run.tensors == [("z", (2, 3)), ("a", (2,))]
    assert not run.has_masks


def test_runs_that_cannot_be_read_are_named_and_left_out(tmp_path: Path) -> None:
    make_run(tmp_path / "good", {"global": [10]})
    (make_run(tmp_path / "unfinished", {"global": [10]}) / "summary.json").unlink()
    (make_run(tmp_path / "torn", {"global": [10]}) / "summary.json").write_text('{"method": ')
    (make_run(tmp_path / "other", {"global": [10]}) / "summary.json").write_text("{}")
    (make_run(tmp_path / "bare", {"global": [10]}) / "clients.csv").unlink()
    make_run(tmp_path / "set_aside" / "old-1", {"global": [10]})
    found = read_runs(folders_under(tmp_path))
    assert [run.name for run in found.runs] == ["good"]
    reasons = dict(found.left_out)
    assert sorted(reasons) == ["bare", "other", "torn", "unfinished"]
    assert "has not finished" in reasons["unfinished"]
    assert "lacks method, mask" in reasons["other"]
    assert "clients.csv" in reasons["bare"]


def test_nothing_to_report_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        folders_under(tmp_path)
    (make_run(tmp_path / "run", {"global": [10]}) / "summary.json").unlink()
    with pytest.raises(
        UserError, match="None of the 1 runs found can be reported: run: it has no summary.json"
    ):
        read_runs(folders_under(tmp_path))


def test_runs_are_found_in_the_tracking_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    with pytest.raises(UserError, match="no tracking store"):
        folders_in_store("tags.method = 'fedspa'")
    client = MlflowClient()
    experiment = client.create_experiment("fedspa", artifact_location=(tmp_path / "artifacts").as_uri())
    for method in ("fedspa", "fedavg"):
        stored = client.create_run(experiment, tags={"method": method}, run_name=method)
        client.log_artifacts(
            stored.info.run_id, str(make_run(tmp_path / method, {"global": [42]}, method=method))
        )
    client.create_run(experiment, tags={"method": "fedspa", "sweep": "seed"}, run_name="of a whole sweep")
    lost = client.create_run(experiment, tags={"method": "fedspa"}, run_name="lost")
    client.set_terminated(lost.info.run_id, "FINISHED")
    client.create_run(experiment, tags={"method": "fedspa"}, run_name="at work")
    found = read_runs(folders_in_store("tags.method = 'fedspa'"))
    assert [(run.summary["method"], run.curve("global").tolist()) for run in found.runs] == [("fedspa", [42])]
    assert found.runs[0].name.startswith("fedspa (")
    [gone, unfinished] = found.left_out
    assert gone[0] == f"lost ({lost.info.run_id[:8]})" and f"{lost.info.run_id}/artifacts" in gone[1]
    assert unfinished[0].startswith("at work (") and "RUNNING" in unfinished[1] and "RUNNING" not in gone[1]
    shutil.rmtree(tmp_path / "artifacts")
    with pytest.raises(UserError, match="None of the 3 runs found can be reported: fedspa .*artifacts"):
        read_runs(folders_in_store("tags.method = 'fedspa'"))
    with pytest.raises(UserError, match="nor a filter of MLflow"):
        folders_in_store("method like dst")
    with pytest.raises(UserError, match="finds no run"):
        folders_in_store("tags.method = 'ditto'")


# Arranging


def test_rows_are_methods_and_settings_are_data_in_the_papers_order(tmp_path: Path) -> None:
    for method, mask in (("local", "none"), ("fedavg", "none"), ("fedspa", "rsm"), ("fedspa", "dst")):
        for name, gamma in (("dirichlet", 0.3), ("dirichlet", 0.5), ("iid", None)):
            partition = {"name": name} | ({"gamma": gamma} if gamma else {})
            folder = tmp_path / f"{method}-{mask}-{name}-{gamma}"
            make_run(folder, {"local": [1]}, method=method, mask=mask, partition=partition, dataset="cifar10")
    study = study_of(tmp_path)
    assert [row.label for row in study.rows] == ["FedSpa (DST)", "FedSpa (RSM)", "FedAvg", "Local"]
    assert [setting.label for setting in study.settings] == [
        "CIFAR-10, IID", "CIFAR-10, Dirichlet 0.5", "CIFAR-10, Dirichlet 0.3",
    ]  # fmt: skip
    assert all(len(setting.runs_of(row)) == 1 for row in study.rows for setting in study.settings)


def test_partitions_of_a_data_set_stand_together(tmp_path: Path) -> None:
    for dataset in ("b.csv", "a.csv"):
        for name in ("iid", "column"):
            make_run(
                tmp_path / f"{dataset}-{name}", {"local": [1]}, dataset=dataset, partition={"name": name}
            )
    labels = [setting.label for setting in study_of(tmp_path).settings]
    assert labels == ["a.csv, IID", "a.csv, column", "b.csv, IID", "b.csv, column"]


def test_a_setting_that_an_older_version_did_not_know_has_its_default(tmp_path: Path) -> None:
    for run, momentum in (("old", {}), ("new", {"momentum": 0.0}), ("other", {"momentum": 0.5})):
        server = {"name": "sgd", "_target_": "fedspa.server_optimizers.sgd.ServerSGD", **momentum}
        make_run(tmp_path / run, {"local": [1]}, seed=len(run), server_optimizer=server)
    found = {run.name: run.settings for run in read_runs(folders_under(tmp_path)).runs}
    assert found["old"].keys() == found["new"].keys() and found["old"]["server_optimizer.momentum"] == 0
    assert len(study_of(tmp_path).rows) == 2


def test_data_sets_in_other_scripts_have_figures_of_their_own(tmp_path: Path) -> None:
    for dataset in ("\u624b\u66f8\u304d", "\u5199\u771f"):
        make_run(tmp_path / dataset, {"local": [1]}, dataset=dataset)
    report = make_report(study_of(tmp_path))
    found = [part.name for part in (*report.tables, *report.pictures)]
    assert len(set(found)) == len(found)


def test_a_methods_public_rows_make_no_other_data(tmp_path: Path) -> None:
    for method, fraction in (("fedmd", "0.1"), ("fedavg", "0.0")):
        make_run(tmp_path / method, {"local": [1]}, method=method, mask="none")
        config = tmp_path / method / "config.yaml"
        config.write_text(
            config.read_text().replace("train_rows:", f"public_fraction: {fraction}\n  train_rows:")
        )
    study = study_of(tmp_path)
    assert [setting.label for setting in study.settings] == ["Digits, Dirichlet 0.3"]
    assert [row.label for row in study.rows] == ["FedAvg", "FedMD"]


def test_runs_of_two_main_metrics_are_two_settings(tmp_path: Path) -> None:
    for metrics in (("mse",), ("mae",), ("mae", "mse")):
        make_run(tmp_path / "-".join(metrics), {"global": [500, 400]}, seed=len(metrics), metrics=metrics)
    study = study_of(tmp_path)
    assert [(setting.split, setting.metric, len(setting.runs)) for setting in study.settings] == [
        ("Dirichlet 0.3 metric=mae", "mae", 2), ("Dirichlet 0.3 metric=mse", "mse", 1),
    ]  # fmt: skip
    known = [
        column.best
        for table in make_report(study).tables
        for place, column in enumerate(table.columns)
        if column.quantity in ("mse", "mae") and any(cells[place].values for cells in table.lines.values())
    ]
    assert known == ["low"] * 3


def test_what_was_varied_of_a_method_makes_rows(tmp_path: Path) -> None:
    for sparsity in (0.8, 0.2):
        for seed in (1, 0):
            make_run(
                tmp_path / f"{sparsity}-{seed}", {"local": [1]}, sparsity=sparsity, seed=seed,
                method="subfedavg", mask="none", training={"lr": 0.1}, alias={"sparsity": sparsity},
            )  # fmt: skip
    make_run(tmp_path / "other", {"local": [1]}, training={"lr": 0.2})
    study = study_of(tmp_path)
    assert [row.label for row in study.rows] == [
        "FedSpa (DST)", "Sub-FedAvg sparsity=0.2", "Sub-FedAvg sparsity=0.8",
    ]  # fmt: skip
    assert [run.seed for run in study.settings[0].runs_of(study.rows[1])] == [0, 1]
    assert "training.lr" in varied(study.runs)


def test_networks_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for model, target in (
        ("resnet18", "fedspa.models.resnet18.ResNet18"),
        ("timm:resnet18", "fedspa.models.timm"),
    ):
        folder = make_run(tmp_path / target, {"local": [1]}, model=model)
        config = OmegaConf.load(folder / "config.yaml")
        config.model = {"name": "resnet18", "_target_": target}
        OmegaConf.save(config, folder / "config.yaml")
    study = study_of(tmp_path)
    labels = [setting.label.split()[-1] for setting in study.settings]
    assert labels == ["model=resnet18", "model=timm:resnet18"]
    assert varied(study.runs) == ["model"]


def test_options_are_named_as_one_types_them(tmp_path: Path) -> None:
    for name in ("erk", "uniform"):
        for clients in (10, 20):
            config = {"layer_sparsity": {"name": name}, "federation": {"clients": clients, "wire": "fp32"}}
            make_run(tmp_path / f"{name}{clients}", {"local": [1]}, **config)
    study = study_of(tmp_path)
    names = ["erk", "uniform"]
    assert [row.label for row in study.rows] == [f"FedSpa (DST) layer_sparsity={name}" for name in names]
    assert [setting.split for setting in study.settings] == [
        "Dirichlet 0.3 federation.clients=10", "Dirichlet 0.3 federation.clients=20",
    ]  # fmt: skip


def test_runs_of_other_precision_are_rows_of_their_own(tmp_path: Path) -> None:
    for seed, precision in enumerate(("32-true", "32-true", "bf16-mixed")):
        make_run(tmp_path / str(seed), {"local": [1]}, seed=seed, hardware={"precision": precision})
    labels = [row.label for row in study_of(tmp_path).rows]
    assert labels == [f"FedSpa (DST) hardware.precision={name}" for name in ("32-true", "bf16-mixed")]
    shutil.rmtree(tmp_path / "2")
    assert [row.label for row in study_of(tmp_path).rows] == ["FedSpa (DST)"]


def test_a_repeated_run_is_left_out_and_an_unknown_method_keeps_its_name(tmp_path: Path) -> None:
    make_run(tmp_path / "a", {"local": [1]}, method="mine", mask="none")
    make_run(tmp_path / "b", {"local": [2]}, method="mine", mask="none", hardware={"threads": 2})
    study = study_of(tmp_path)
    assert [row.label for row in study.rows] == ["mine"]
    assert [run.name for run in study.runs] == ["b"]
    assert study.left_out == [("a", "b repeats its settings and seed")]


# The published names; for what has several spellings, that of its paper's title or of its algorithm.
PUBLISHED = {
    "method": "APFL DisPFL Ditto FedAdagrad FedAdam FedALA FedAvg FedAvgM FedBABU FedBN FedDST FedDyn FedMD FedPer "
    "FedProx FedRep FedSelect FedSpa FedYogi L2GD LG-FedAvg Local LotteryFL MAPPER pFedMe SCAFFOLD SSFL Sub-FedAvg "
    "Subsampling",
    "mask": "DeepR DSR DST GMP GraNet N:M none RigL RSM SNFS SNIP Top-KAST channels",
}


@pytest.mark.parametrize("group", PUBLISHED)
def test_each_method_and_searcher_has_its_published_name(group: str) -> None:
    printed = set()
    for file in (config_dir() / group).glob("*.yaml"):
        node = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        assert isinstance(node, dict)
        printed.add(labels.component(group, node.get(group, node)))
    assert printed - {"FedSpa head", "FedSpa plus"} == set(PUBLISHED[group].split())


def test_a_plug_in_has_labels_too_and_no_other_package_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_methods.py").write_text(
        "from fedspa.methods.scaffold import Scaffold\n"
        "class Mine(Scaffold):\n    label = 'mine-v2'\n"
        "class Later(Mine): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def label(name: str, own: str) -> str:
        return labels.component("method", {"name": name, "_target_": f"own_methods.{own}"})

    assert label("mine", "Mine") == "Mine" and "own_methods" not in sys.modules
    monkeypatch.setattr(components, "plugin_packages", lambda: ["own_methods"])
    assert label("mine_v2", "Mine") == "mine-v2"
    assert label("later", "Later") == "Later"


@pytest.mark.parametrize(
    ("name", "own", "printed"),
    [
        ("fedspa_head", "FedSpa", "FedSpa head"),
        ("my_method", "MyMethod", "MyMethod"),
        ("mine", "Other", "mine"),
    ],
)
def test_a_method_that_is_not_installed_is_labelled_by_its_name_and_its_class(
    name: str, own: str, printed: str
) -> None:
    assert labels.component("method", {"name": name, "_target_": f"somewhere.{own}"}) == printed


# Numbers


def test_deviations_are_of_the_population() -> None:
    assert Cell("", (80.0, 82.0)).std == 1.0


def test_a_goal_is_reached_in_a_round_or_never(tmp_path: Path) -> None:
    run = run_of(make_run(tmp_path / "run", {"global": [50, 70, 69]}))
    assert (run.first_round("global", 70), run.first_round("global", 71)) == (2, math.inf)
    assert run.first_round("local", 70) is None


def test_seconds_are_those_of_one_client_update(tmp_path: Path) -> None:
    run = run_of(make_run(tmp_path / "run", {"local": [1, 2, 3]}))  # two client updates a round
    assert run.seconds_per_update("train") == pytest.approx(0.2)
    assert run.seconds_per_update("search") == pytest.approx(0.05)


# Masks: z has six weights, a has two

ALIKE = {
    "0": [1, 1, 1, 0, 0, 0, 1, 1],
    "1": [1, 1, 1, 0, 0, 0, 1, 1],
    "2": [0, 0, 0, 1, 1, 1, 1, 1],
    "3": [1, 0, 0, 1, 1, 0, 1, 1],
}


def test_densities_follow_the_order_of_the_flat_weights(tmp_path: Path) -> None:
    found = masks.densities(run_of(make_run(tmp_path / "run", {"local": [1]}, masks=ALIKE)))
    assert found.tolist() == [[0.5, 1.0]] * 4


def test_mask_overlap_against_label_similarity(tmp_path: Path) -> None:
    found = masks.overlap(run_of(make_run(tmp_path / "run", {"local": [1]}, masks=ALIKE)))
    assert found is not None
    pairs = ["01", "02", "03", "12", "13", "23"]
    assert dict(zip(pairs, found.label_similarity, strict=True)) == {
        "01": 1, "02": 0, "03": 0.5, "12": 0, "13": 0.5, "23": 0.5,
    }  # fmt: skip
    assert found.mask_overlap == pytest.approx(
        [1, 0, 1 / 5, 0, 1 / 5, 2 / 4]
    )  # the dense tensor a does not count
    assert found.by_chance == pytest.approx(0.25 / 0.75)
    assert found.correlation == pytest.approx(np.corrcoef(found.label_similarity, found.mask_overlap)[0, 1])
    assert found.p_value is not None and 0.001 <= found.p_value <= 1


def test_equal_masks_have_no_correlation(tmp_path: Path) -> None:
    same = dict.fromkeys("0123", ALIKE["0"])
    found = masks.overlap(run_of(make_run(tmp_path / "run", {"local": [1]}, masks=same)))
    assert found and found.correlation is None and found.mask_overlap.tolist() == [1] * 6
    dense = dict.fromkeys("0123", [1] * 8)
    assert masks.overlap(run_of(make_run(tmp_path / "dense", {"local": [1]}, masks=dense))) is None
