"""Studies and their jobs, what a rerun skips, what a failure leaves, and a real sweep as MLflow shows it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qsl, urlsplit

import pytest
from data_files import OF_FILES, write_data
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from fedspa.checkpoints.data_there import file_marks
from fedspa.cli import main
from fedspa.core.errors import UserError
from fedspa.core.names import final, score
from fedspa.federated.sampling import sample_clients
from fedspa.planning import dry_run
from fedspa.planning.cost_report import CostReport
from fedspa.runs.assembly import build
from fedspa.studies.jobs import Job, Study, study
from fedspa.studies.launchers import JobFailed
from fedspa.studies.progress import Progress
from fedspa.studies.results import scores
from fedspa.studies.sweep import only_one
from fedspa.tracking.mlflow_tracker import MLflowTracker
from fedspa.tracking.page import NOTE, PARENT
from fedspa.tracking.store import open_store
from fedspa.tracking.sweep_run import nested_in
from fedspa.training.choice import Eager
from fedspa.training.compiled import CompiledEngine

ROOT = Path(__file__).resolve().parents[1]
JOBS = {
    "main": 9 * 3 * 7,
    "sparsity": 3 * 3 * 5,
    "layer_sparsity": 3 * 3 * 2,
    "initial_masks": 3 * 3 * 2 * 2,
    "regrow": 3 * 3 * 2,
    "kinds": 3 * 3 * 3,
    "wall_time": 3,
    "federation": 22 + 2 * 9 + 7,
    "head_variants": 7,
    "channels": 3 * 5,
    "methods": 3 * 30,
    "methods_tuned": 3 * 30,
}
METHODS = [
    ("fedspa", "dst"),
    ("fedspa", "rsm"),
    ("fedavg", "none"),
    ("ditto", "none"),
    ("local", "none"),
    ("subfedavg", "none"),
    ("subsampling", "none"),
]


def shipped(name: str, *words: str) -> Study:
    """`-m sweep=<name> <words>`, as far as Hydra is not needed."""
    sweeper = OmegaConf.load(ROOT / "sweeps" / f"{name}.yaml").hydra.sweeper
    return study(
        sweeper.get("params", {}),
        sweeper.get("rows", []),
        [f"sweep={name}", *words],
        OverridesParser.create(),
    )


def adhoc(*words: str) -> Study:
    """`-m <words>`."""
    return study({}, [], words, OverridesParser.create())


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """`sweep(task, "seed=0,1")`: the exit code of that sweep of small runs, in this process and in tmp_path."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # `main` sets it; so pytest puts it back

    def sweep(task, *words: str) -> int:
        own = ["experiment=digits_study", "logger=none", f"hydra.sweep.dir={tmp_path}"]
        monkeypatch.setattr(sys, "argv", ["train.py", "-m", *own, *words])
        return main(task)

    return sweep


def finish(plan, folder):
    """What a run leaves that the next sweep looks at."""
    (folder / "rounds.csv").touch()
    (folder / "summary.json").write_text(json.dumps({"config_hash": plan.config_hash}))


def never(plan, folder):
    raise AssertionError("nothing is left to run")


def test_a_large_study_says_how_far_its_check_is(sweep, monkeypatch, capsys):
    monkeypatch.setattr("fedspa.studies.sweep.PROGRESS_SECONDS", 0.0)
    assert sweep(finish, "seed=0,1,2") == 0
    told = capsys.readouterr().err
    assert "1 of 3 done." in told and "2 of 3 done." in told


# The studies


def test_every_file_is_known_here():
    searches = {"tune"}  # test_search.py runs it
    assert {file.stem for file in (ROOT / "sweeps").iterdir()} == set(JOBS) | searches


@pytest.mark.parametrize("name", JOBS)
def test_a_study_has_its_jobs(name):
    jobs = shipped(name).jobs
    assert len(jobs) == JOBS[name]
    assert len({job.name for job in jobs}) == len({frozenset(job.overrides) for job in jobs}) == len(jobs)
    assert (ROOT / "sweeps" / f"{name}.yaml").read_text().splitlines()[
        1
    ] == f"# python src/train.py -m sweep={name}"


def test_the_main_comparison_pairs_methods_with_masks(plan):
    plans = [plan(*job.overrides) for job in shipped("main", "experiment=digits_study", "seed=1").jobs]
    assert [(plan.names["method"], plan.names["mask"]) for plan in plans] == METHODS
    assert {(plan.settings.seed, plan.settings.finetune.epochs) for plan in plans} == {(1, 5)}


@pytest.mark.parametrize(
    ("name", "key", "values"),
    [
        ("sparsity", "sparsity", [0.2, 0.4, 0.5, 0.6, 0.8]),
        ("layer_sparsity", "layer_sparsity.name", ["erk", "uniform"]),
        ("initial_masks", "mask.initial", ["same", "different"] * 2),
        ("regrow", "mask.regrow", ["gradient", "random"]),
        ("kinds", "finetune.epochs", [5, 5, 5]),
        ("wall_time", "hardware.workers", [1]),
        ("channels", "mask.name", ["none", "dst", "channels", "dst", "channels"]),
    ],
)
def test_a_study_sets_what_it_is_about(plan, name, key, values):
    plans = [plan(*job.overrides) for job in shipped(name, "experiment=digits_study", "seed=0").jobs]
    assert [OmegaConf.select(OmegaConf.create(plan.resolved), key) for plan in plans] == values


@pytest.mark.parametrize("preset", ["digits_study", "cifar10_study"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_small_studies_train_every_client_often(plan, preset, seed):
    """Sub-FedAvg prunes 5 % a client update: with 15 of them it can get to about half."""
    federation = plan(f"experiment={preset}").settings.federation
    clients, count = federation.clients, federation.clients_per_round
    rounds = (sample_clients(seed, round, clients, count) for round in range(federation.rounds))
    updates = Counter(client for participants in rounds for client in participants)
    assert len(updates) == clients
    assert min(updates.values()) >= 15


def test_methods_are_compared_at_equal_training(plan):
    """A method that trains more does so by a pass of another model, by mini-batches or by public rows."""
    flops = {}
    for job in shipped("methods", "seed=0").jobs:
        planned = plan(*job.overrides)
        if not planned.method.uses_sparsity:
            flops[planned.names["method"]] = CostReport.of(planned).total.flops
    assert {name for name in flops if flops[name] > flops["fedavg"]} == {"mapper", "fedala", "fedmd"}
    assert {name for name in flops if flops[name] < flops["fedavg"]} == {"fedselect"}  # one pass, at first


# What the command line adds


def test_the_command_line_replaces_an_axis():
    jobs = shipped("sparsity", "sparsity=0.3", "seed=7", "experiment=digits_study").jobs
    assert [job.name for job in jobs] == ["experiment=digits_study,seed=7,sparsity=0.3"]


def test_the_command_line_replaces_all_rows():
    small = ["seed=0", "experiment=digits_study"]
    names = [job.name for job in shipped("main", "method=fedavg,local", *small).jobs]
    assert names == [
        "experiment=digits_study,method=fedavg,seed=0",
        "experiment=digits_study,method=local,seed=0",
    ]
    whole = {job.name: set(job.overrides) for job in shipped("main", *small).jobs}
    assert whole.keys() > set(names)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "sparsity"),
        (["seed=3,4", "experiment=digits_study"], "sparsity"),
        (["dataset.path=/some/folder", "logger=none", "hardware.workers=1", "dry_run=true"], "sparsity"),
        (["training.lr=0.01"], "sparsity,training.lr=0.01"),
        (["training.lr=0.01", "method=fedspa"], "sparsity,method=fedspa,training.lr=0.01"),
        (["method=fedspa", "training.lr=0.01"], "sparsity,method=fedspa,training.lr=0.01"),
        (["save.local=true"], "sparsity,save.local=True"),
        (["hardware=cpu", "hardware.precision=bf16-mixed"], "sparsity,hardware.precision=bf16-mixed"),
        (["training.lr=0.1,0.01"], "sparsity"),
        (["dataset.hub=org/name"], "sparsity,dataset.hub=org%2Fname"),
    ],
)
def test_what_the_study_does_not_vary_makes_a_variant(words, name):
    assert shipped("sparsity", *words).name == name


def test_a_value_that_is_given_twice_is_one_job():
    assert [job.name for job in adhoc("seed=0,1,0", "mask=dst,dst").jobs] == [
        "mask=dst,seed=0", "mask=dst,seed=1",
    ]  # fmt: skip


def test_a_job_is_named_by_what_varies():
    both = adhoc("method=fedspa,fedavg", "seed=0,1", "training.lr=0.2")
    assert both.name == "method+seed,training.lr=0.2"
    assert [job.name for job in both.jobs] == [
        f"method={m},seed={s}" for m in ("fedspa", "fedavg") for s in (0, 1)
    ]
    assert both.jobs[3].overrides == ("method=fedavg", "seed=1", "training.lr=0.2")
    assert adhoc("seed=0,1", "training.lr=0.2", "method=fedspa,fedavg").name == both.name
    assert adhoc("hardware=cpu,gpu").jobs[0].name == "hardware=cpu"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("range(0.1,0.5,0.1)", ["0.1", "0.2", "0.3", "0.4"]),
        ("range(0.3,0.6,0.1)", ["0.3", "0.4", "0.5"]),
        ("range(1.0,0,-0.3)", ["1.0", "0.7", "0.4", "0.1"]),
        ("sort(range(0.1,0.9,0.2),reverse=true)", ["0.7", "0.5", "0.3", "0.1"]),
        ("range(0,1,0.25)", ["0.0", "0.25", "0.5", "0.75"]),
        ("range(1e-5,4e-5,1e-5)", ["1e-05", "2e-05", "3e-05"]),
        ("range(3)", ["0", "1", "2"]),
        ("range(5,0,-2)", ["5", "3", "1"]),
    ],
)
def test_a_range_is_counted_in_the_decimals_that_were_written(values, expected):
    assert [job.name for job in adhoc(f"sparsity={values}").jobs] == [f"sparsity={text}" for text in expected]


def test_a_shuffled_range_has_all_its_values():
    names = {job.name for job in adhoc("seed=shuffle(range(0.0,0.7,0.1))").jobs}
    assert names == {f"seed={value}" for value in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)}


@pytest.mark.parametrize("values", ["range(3,1)", "range(0.0,1.0,0)", "range(0,inf,1)", "range(0.1,nan,0.1)"])
def test_a_range_without_values_is_no_study(values):
    with pytest.raises(UserError, match="is no list of values: "):
        adhoc(f"seed={values}")


@pytest.mark.parametrize(
    ("words", "title"),
    [
        (["mask=dst,rsm", "sparsity=0.95", "seed=0,1"], "dst seed0"),
        (["mask=dst,rsm", "sparsity=0.95,0.5", "seed=0,1"], "dst s0.95 seed0"),
        (["training.lr=0.1,1", "training.drop_last=true,false"], "drop_lastTrue lr0.1"),
        (["training.lr=0.1,1", "server_optimizer.lr=0.5,1"], "server_optimizer.lr0.5 training.lr0.1"),
        (["mask.regrow=random,gradient"], "random"),
        (["seed=3"], "single"),
    ],
)
def test_a_job_has_a_short_title(words, title):
    assert adhoc(*words).jobs[0].title == title


def test_one_run_is_a_sweep_too():
    assert (adhoc("seed=3").name, adhoc("seed=3").jobs[0].name) == ("single,seed=3", "single")


def test_long_names_stay_apart():
    first, second = (
        adhoc("seed=0,1", f"name={'x' * 10}", f"dataset.hub={'y' * 300}{end}").name for end in "ab"
    )
    assert first != second
    assert max(len(first), len(second)) < 100
    words = [f"mask.{key}=0.123456" for key in ("aaaaaaaa", "bbbbbbbb", "cccccccc", "dddddddd")]
    assert adhoc("seed=0,1", *words).name.rpartition("-")[0] == ",".join(["seed", *words[:3]])


def test_one_study_at_a_time():
    with pytest.raises(UserError, match="one study at a time"):
        adhoc("sweep=main,sparsity")


# What runs, and what is skipped


def test_a_rerun_skips_what_finished_and_keeps_what_broke_off(sweep, tmp_path):
    folder = tmp_path / "seed,experiment=digits_study"

    def flaky(plan, folder):
        (folder / "rounds.csv").write_text("half")
        if plan.settings.seed == 1:
            raise RuntimeError("the power failed")
        finish(plan, folder)

    assert sweep(flaky, "seed=0,1,2") == 1
    rerun = []
    task = lambda plan, folder: (rerun.append(plan.settings.seed), finish(plan, folder))  # noqa: E731
    assert sweep(task, "seed=0,1,2") == 0
    assert rerun == [1]
    assert (folder / "set_aside" / "seed=1-1" / "rounds.csv").read_text() == "half"
    assert sweep(never, "seed=2,1,0") == 0
    assert sweep(task, "seed=2,3") == 0
    assert rerun == [1, 3]


def test_a_finished_run_of_another_config_is_kept(sweep, tmp_path):
    folder = tmp_path / "seed,experiment=digits_study" / "seed=0"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"config_hash": "of an older version"}')
    assert sweep(finish, "seed=0,1") == 0
    assert "older" not in (folder / "summary.json").read_text()
    assert "older" in (folder.parent / "set_aside" / "seed=0-1" / "summary.json").read_text()


def test_a_finished_run_is_skipped_though_a_newer_version_has_more_settings(sweep, tmp_path):
    def older(plan, folder, changed=""):
        config = json.loads(json.dumps(plan.resolved))
        del config["dataset"]["val_fraction"]
        del config["save"]
        if changed:
            config["dataset"]["test_fraction"] = changed
        (folder / "config.yaml").write_text(f"# config_hash: older\n{json.dumps(config)}")
        (folder / "summary.json").write_text('{"config_hash": "older", "data_files": ""}')

    assert sweep(older, "seed=0") == 0
    assert sweep(never, "seed=0") == 0
    words, ran = ("seed=0", "sparsity=0.3"), []
    assert sweep(lambda plan, folder: older(plan, folder, changed=0.5), *words) == 0
    assert sweep(lambda plan, folder: ran.append(plan), *words) == 0
    assert len(ran) == 1


@pytest.mark.parametrize(
    "config",
    ["[1, 2", "[1, 2]", "dataset: digits", "dataset: {_target_: fedspa.core.errors.UserError}", "metrics: 3"],
)
def test_a_job_with_a_config_that_cannot_be_read_runs_again(sweep, config):
    def broken(plan, folder):
        (folder / "config.yaml").write_text(f"# config_hash: older\n{config}")
        (folder / "summary.json").write_text('{"config_hash": "older", "data_files": ""}')

    ran = []
    assert sweep(broken, "seed=0") == 0
    assert sweep(lambda plan, folder: ran.append(plan), "seed=0") == 0
    assert len(ran) == 1


def test_a_finished_run_of_other_numbers_or_data_is_none_of_this_sweep(sweep, tmp_path):
    data, ran = write_data(tmp_path / "data", 0), []
    words = (*OF_FILES, f"dataset.path={data}", "seed=0,1")

    def task(plan, folder):
        ran.append(plan.settings.seed)
        finish(plan, folder)
        told = {"data_files": file_marks(str(data)), "data_hash": plan.dataset.load().hash}
        (folder / "summary.json").write_text(json.dumps({"config_hash": plan.config_hash, **told}))

    assert sweep(task, *words) == 0
    assert sweep(never, *words) == 0
    os.utime(data / "train-labels-idx1-ubyte")  # the same labels, written again
    assert sweep(never, *words) == 0
    write_data(data, 1)
    assert sweep(task, *words) == 0
    assert sweep(task, *words, "hardware.precision=64-true") == 0
    assert ran == [0, 1] * 3
    assert sorted(path.name for path in tmp_path.glob("*/set_aside/*")) == ["seed=0-1", "seed=1-1"]


def test_a_broken_summary_is_no_finished_run(sweep, tmp_path):
    folder = tmp_path / "seed,experiment=digits_study" / "seed=0"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"config_h')
    seen = []
    assert sweep(lambda plan, folder: seen.append(plan.settings.seed), "seed=0,1") == 0
    assert seen == [0, 1]


def test_failures_are_told_at_once_and_in_a_table(sweep, capsys, monkeypatch):
    # Else a slow machine tells how far the checks are.
    monkeypatch.setattr("fedspa.studies.sweep.PROGRESS_SECONDS", 1e9)
    told = []

    def task(plan, folder):
        told.append(capsys.readouterr().err)
        if plan.settings.seed == 2:
            raise RuntimeError("a bug")

    assert sweep(task, "seed=1,2,3") == 1
    assert told[0] == ""
    assert told[2].startswith("Failed: seed,experiment=digits_study/seed=2\nTraceback")
    assert capsys.readouterr().err == "\n1 of 3 jobs failed:\n  seed=2  RuntimeError: a bug\n"


def test_no_job_starts_if_the_config_of_one_has_a_mistake(sweep, capsys, monkeypatch):
    monkeypatch.setattr("fedspa.studies.sweep.PROGRESS_SECONDS", 1e9)
    for words in ((), ("dry_run=true",)):
        assert sweep(never, "sparsity=0.5,95", *words) == 2
        assert capsys.readouterr().err == (
            "\n1 of 2 jobs cannot run, so no job is started:\n"
            "  sparsity=95  sparsity=95.0 is out of range: it must be in [0, 1).\n"
        )


def test_jobs_that_repeat_another_one_are_named(sweep, capsys, monkeypatch):
    monkeypatch.setattr(dry_run, "_speed", lambda plan: 1e9)
    said = "\nJobs that differ from another one only in settings that they do not use: "
    named = "method=fedavg,sparsity=0.8 repeats method=fedavg,sparsity=0.5.\n"
    for task, *words in ((never, "dry_run=true"), (finish,)):
        assert sweep(task, "method=fedspa,fedavg", "sparsity=0.5,0.8", *words) == 0
        shown = capsys.readouterr().out
        assert said + named in shown
    assert sweep(finish, "sparsity=0.5,0.8") == sweep(finish, "engine=eager,compiled") == 0
    assert " repeats " not in capsys.readouterr().out


def test_what_hydra_refuses_is_told_before_the_first_job(sweep, capsys):
    assert sweep(never, "seed=0,1", "mask=dst,dts") == 2
    assert capsys.readouterr().err.startswith("Error: mask=dts is not known: did you mean dst or dsr?")


def test_a_study_needs_m(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", ["train.py", "sweep=main", f"hydra.run.dir={tmp_path}/run"])
    assert main(never) == 2
    assert capsys.readouterr().err == "Error: sweep=main stands for many runs: add -m to start them.\n"


def test_a_study_whose_axes_all_have_one_value_is_one_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    own = ["train.py", "sweep=regrow", "seed=0", "experiment=digits_study", f"hydra.run.dir={tmp_path}/run"]
    monkeypatch.setattr(sys, "argv", own)
    assert main(never) == 2
    assert "stands for many runs" in capsys.readouterr().err
    found = []
    monkeypatch.setattr(sys, "argv", [*own, "mask.regrow=random"])
    assert main(lambda plan, folder: found.append(plan.mask.regrow)) == 0
    assert found == ["random"]


def test_a_study_that_runs_already_is_refused(sweep, tmp_path, capsys):
    with only_one(tmp_path, "seed,experiment=digits_study"):
        assert sweep(never, "seed=0,1") == 2
    assert capsys.readouterr().err.startswith("Error: The sweep seed,experiment=digits_study is running in ")
    assert sweep(finish, "seed=0,1") == 0


def test_a_sweep_says_which_job_begins_and_how_long_the_rest_takes(sweep, monkeypatch, capsys):
    clock = iter([0.0, 60.0, 150.0])
    monkeypatch.setattr("fedspa.studies.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert sweep(finish, "seed=0,1,2") == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("job")]
    assert told == [
        "job 1 of 3: seed=0",
        "job 2 of 3, about 2.0 min left: seed=1",
        "job 3 of 3, about 75 s left: seed=2",
    ]


def test_jobs_side_by_side_are_counted_as_they_end(capsys):
    progress, finished = Progress(2), {"seed=9": "was there"}
    with progress.watching(lambda: dict(finished)):
        finished["seed=0"] = "personal 80.0 %"
    assert capsys.readouterr().out.startswith("1 of 2 jobs done, about ")


def test_the_table_at_the_end_has_means_over_seeds(sweep, tmp_path, capsys):
    def task(plan, folder):
        finish(plan, folder)
        scores = {final(score("accuracy", "global")): 60.0 + 3 * plan.settings.seed}
        if plan.names["method"] == "fedspa":
            scores[final(score("accuracy", "personal"))] = 80.0 + plan.settings.seed
        (folder / "summary.json").write_text(json.dumps({"config_hash": plan.config_hash, **scores}))

    assert sweep(task, "method=fedspa,fedavg", "seed=0,1") == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()[-5:]]
    assert [line.split() for line in lines[:3]] == [
        ["mean", "accuracy", "in", "%", "runs", "global", "personal"],
        ["method=fedspa", "2", "61.50", "80.50"],
        ["method=fedavg", "2", "61.50", "-"],
    ]
    assert lines[3:] == [
        "",
        f"Report: python src/report.py runs={tmp_path}/method+seed,experiment=digits_study",
    ]
    assert scores([]) == []


def test_a_failure_may_come_from_another_process():
    failed = pickle.loads(pickle.dumps(JobFailed(2, "sparsity=2 is out of range")))
    assert (failed.code, failed.reason) == (2, "sparsity=2 is out of range")


# A dry run


def test_a_dry_run_lists_costs_and_times(sweep, plan, monkeypatch, capsys):
    """Times by hand: FLOPs as if dense, and forward passes of the tests, at a speed of 1e7 FLOP/s."""
    monkeypatch.setattr(dry_run, "_speed", lambda plan: 1e7)
    words = ["federation.rounds=4", "eval.every=2", "finetune.epochs=2"]
    assert sweep(never, "sweep=sparsity", "seed=0", "sparsity=0.5,0.8", "dry_run=true", *words) == 0
    lines = capsys.readouterr().out.splitlines()
    report = CostReport.of(plan("experiment=digits_study", *words))
    forward = report.network.forward_flops()
    rows, searched = 1397 / 20, 16
    updates, tested = (
        4 * 15,
        2 * 20 * 2 + 4 * 15,
    )  # global and personal model of all clients twice, local ones
    searches = 3 * 15  # in the last round nothing is exchanged
    trained = updates * 5 * rows + searches * searched + 20 * 2 * rows
    seconds = forward * (3 * trained + tested * 30) / 1e7
    assert 100 * 60 < seconds < 100 * 3600  # in hours
    found = next(line.split() for line in lines if "sparsity=0.5" in line)
    assert found[0] == "experiment=digits_study,seed=0,sparsity=0.5"
    assert float(found[1]) == pytest.approx(report.total.flops, rel=1e-3)
    assert found[2:4] == [f"{report.total.traffic_bytes / 1e6:.1f}", "MB"]
    assert found[4:] == [f"{seconds / 3600:.1f}", "h"]
    assert lines[4].startswith("all 2")
    assert lines[4].split()[-2:] == [f"{2 * seconds / 3600:.1f}", "h"]


def test_a_dry_run_knows_what_is_finished(sweep, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "_speed", lambda plan: 1e9)
    assert sweep(finish, "seed=0,1") == 0
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert sweep(never, "seed=0,1", "dry_run=true") == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[2:5])
    one, other, all_of_them = listed.values()
    assert one.split()[-1] == other.split()[-1] == "finished" and all_of_them.split()[-2:] == ["0.0", "s"]
    assert list(listed) == ["seed=0", "seed=1", "all"]
    assert sorted(tmp_path.rglob("*")) == before


def test_the_speed_is_measured_here(plan, monkeypatch):
    monkeypatch.setattr(dry_run, "PROBE_SECONDS", 0.01)
    one = dry_run._speed(CostReport.of(plan("hardware=cpu", "hardware.workers=1")))
    assert 1e7 < one < 1e13


def test_the_speed_is_that_of_the_engine_that_the_run_will_take(plan, monkeypatch):
    monkeypatch.setattr(dry_run, "PROBE_SECONDS", 0.01)
    samples, train = [], CompiledEngine.train

    def counted(engine, task):
        samples.append(len(task.rows))
        return train(engine, task)

    monkeypatch.setattr(CompiledEngine, "train", counted)
    words = ("hardware=cpu", "training.batch_size=2", "federation.clients_per_round=3")
    report = CostReport.of(plan(*words, "engine=compiled", "engine.compiler=null"))
    assert dry_run._speed(report) > 0 and set(samples) == {2}


def test_the_engine_of_a_dry_run_is_asked_for_what_the_run_asks_for(plan, monkeypatch):
    """The sizes of the clients apart, which are even in a dry run, and here in the run."""
    monkeypatch.setattr(dry_run, "PROBE_SECONDS", 0.01)
    asked, built = [], Eager.build

    def noted(choice, eager, workload):
        asked.append(workload)
        return built(choice, eager, workload)

    monkeypatch.setattr(Eager, "build", noted)
    chosen = plan("hardware=cpu", "hardware.workers=1", "engine=eager", "mask=dst", "partition=iid")
    dry_run._speed(CostReport.of(chosen))
    build(chosen)
    assert asked[0] == asked[1] and asked[0].steps > 0 and asked[0].gradients


# MLflow


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A tracking store whose experiments keep their files beside it, not in the project."""
    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder}/mlflow.db"
    client, _ = open_store(uri, "unused")
    for experiment in ("fedspa", "status"):
        client.create_experiment(experiment, artifact_location=(folder / experiment).as_uri())
    return uri


def test_a_sweeps_run_is_found_again_and_tells_the_truth(store, capsys):
    loggers = {"mlflow": MLflowTracker(tracking_uri=store, experiment="status")}
    client, experiment = open_store(store, "status")

    def only():
        (found,) = client.search_runs([experiment])
        return found.info.run_name, found.info.status

    with nested_in("sparsity", loggers) as parent:
        assert only() == ("sparsity", "RUNNING")
        parent.failed = 1
    assert only() == ("sparsity", "FAILED")
    with nested_in("sparsity", loggers):
        assert only() == ("sparsity", "RUNNING")
    assert only() == ("sparsity", "FINISHED")
    with pytest.raises(KeyboardInterrupt), nested_in("sparsity", loggers):
        raise KeyboardInterrupt
    assert only() == ("sparsity", "KILLED")
    with pytest.raises(RuntimeError), nested_in("sparsity", loggers):
        raise RuntimeError
    assert only() == ("sparsity", "FAILED")
    told = capsys.readouterr().out.split("\n\n")
    assert len({line.strip() for line in told}) == 1 and told[0].strip().startswith(
        f"All runs of sparsity in MLflow: run `mlflow ui --backend-store-uri {store}`"
    )
    job = client.create_run(experiment, tags={PARENT: parent.run_id}).info.run_id
    address = dict(parse_qsl(urlsplit(urlsplit(told[0].split()[-1]).fragment).query))
    assert address["workflowType"] == "machine_learning"
    tag = f"mlflow.sharedViewState.{address['viewStateShareKey']}"
    view = json.loads(client.get_experiment(experiment).tags[tag])
    shown = client.search_runs([experiment], view["searchFilter"], order_by=[f"{view['orderByKey']} ASC"])
    assert [run.info.run_id for run in shown] == [job]
    assert "metrics.`accuracy/personal`" in view["selectedColumns"]


def test_repetitions_have_the_label_of_what_differs_but_for_the_seed():
    jobs = tuple(
        Job(("experiment=digits_study", f"mask={mask}", f"seed={seed}"), ())
        for mask in ("dst", "rsm")
        for seed in (0, 1)
    )
    assert [Study("s", jobs).label(job) for job in jobs] == ["mask=dst"] * 2 + ["mask=rsm"] * 2
    assert [Study("s", jobs[:2]).label(job) for job in jobs[:2]] == ["all", "all"]


def test_without_mlflow_nothing_is_nested():
    with nested_in("sparsity", {}) as parent:
        assert parent.overrides("seed=0") == []


def test_a_real_sweep(tmp_path, store):
    """Two jobs that train; then the same again."""

    def train(*words: str) -> subprocess.CompletedProcess[str]:
        tiny = ["federation.rounds=1", "federation.clients_per_round=2", "hardware.workers=1"]
        command = [
            sys.executable,
            str(ROOT / "src/train.py"),
            "-m",
            *tiny,
            f"hydra.sweep.dir={tmp_path}",
            *words,
        ]
        environment = os.environ | {"MLFLOW_TRACKING_URI": store}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    first = train("seed=0,1")
    assert first.returncode == 0, first.stderr
    table, mlflow, report = first.stdout.splitlines()[-5::2]
    assert table.startswith("all ") and report.startswith("Report: ")
    assert mlflow.startswith("All runs of seed,") and " in MLflow: " in mlflow
    assert first.stdout.count("MLflow: ") == 1  # the study's page has its jobs
    folder = tmp_path / "seed,federation.clients_per_round=2,federation.rounds=1"
    summaries = {path.parent.name: path.read_bytes() for path in folder.glob("*/summary.json")}
    assert summaries.keys() == {"seed=0", "seed=1"}

    second = train("seed=0,1")
    assert second.returncode == 0, second.stderr
    assert "2 of them are finished already." in second.stdout
    assert {path.parent.name: path.read_bytes() for path in folder.glob("*/summary.json")} == summaries

    client, experiment = open_store(store, "fedspa")
    runs = client.search_runs([experiment])
    (parent,) = [run for run in runs if PARENT not in run.data.tags]
    nested = [run for run in runs if PARENT in run.data.tags]
    assert (parent.info.run_name, parent.info.status) == (folder.name, "FINISHED")
    assert {run.data.tags[PARENT] for run in nested} == {parent.info.run_id}
    assert {run.info.run_name for run in nested} == {"seed0", "seed1"}  # what differs
    note = parent.data.tags[NOTE]
    assert note.startswith("| mean accuracy in % | runs | global") and "| all | 2 | " in note
    assert "| `seed=1` | global " in note and f"path=study.png&run_uuid={parent.info.run_id}" in note
    assert [file.path for file in client.list_artifacts(parent.info.run_id)] == ["study.png"]
    assert sorted((run.data.tags["seed"], run.info.status) for run in nested) == [
        ("0", "FINISHED"),
        ("1", "FINISHED"),
    ]
