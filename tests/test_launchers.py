"""Sweeps whose jobs run side by side: their share of the cores, their signals, and whole sweeps by real launchers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tracking_runs import run_info, run_record, run_result

from fedspa.cli import main
from fedspa.runs.interruption import Preempted
from fedspa.studies import launchers
from fedspa.studies.launchers import (
    CONSOLE,
    VISIBLE,
    JobFailed,
    cores_of_a_job,
    in_own_process,
    jobs_get_signals,
    take_a_gpu,
)
from fedspa.tracking.fanout import Trackers
from fedspa.tracking.mlflow_tracker import MLflowTracker
from fedspa.tracking.page import PARENT
from fedspa.tracking.run_folder import RunFolder
from fedspa.tracking.store import open_store

ROOT = Path(__file__).resolve().parents[1]
TINY = [
    *("federation.rounds=2", "federation.clients=4", "federation.clients_per_round=2", "training.epochs=1"),
    "model=small_cnn",
]


@pytest.mark.parametrize(
    ("options", "jobs", "expected"),
    [
        ({"n_jobs": -1}, 9, 1),
        ({"n_jobs": -1}, 3, 2),
        ({"n_jobs": -5}, 9, 2),  # all cores but four
        ({"n_jobs": 2}, 9, 4),
        ({"n_jobs": 100}, 100, 1),
        ({"n_jobs": None}, 9, 8),  # one at a time
        ({"cpus_per_task": 6}, 20, 6),
        ({"ray": {"remote": {"num_cpus": 3}}}, 20, 3),
        ({}, 20, None),
    ],
)
def test_eight_cores_are_shared_out(options, jobs, expected, monkeypatch):
    monkeypatch.setattr(launchers, "usable_cores", lambda: 8)
    assert cores_of_a_job(options, jobs) == expected


@pytest.mark.parametrize("option", ["cores", "slurm"])
def test_the_ready_configs_compose(option, tmp_path):
    """That of ray needs what stands beside nothing here."""
    words = [f"hydra/launcher={option}", "--cfg", "hydra", "-p", "hydra.launcher"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "src/train.py"), *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert "_target_: hydra_plugins.hydra_" in done.stdout, done.stderr


def test_a_ray_cluster_that_runs_is_joined():
    """It refuses to be told how large its object store is, which the plug-in does where nothing stands there."""
    init = OmegaConf.load(ROOT / "conf/hydra/launcher/ray_cluster.yaml").ray.init
    assert init.address == "auto" and init.setdefault("object_store_memory", 78643200) is None


@pytest.mark.skipif(find_spec("ray") is not None, reason="it is installed")
@pytest.mark.parametrize(("option", "extra"), [("ray", "ray"), ("ray_cluster", "ray")])
def test_a_launcher_that_is_not_installed_is_a_sentence(option, extra, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    words = ["train.py", "-m", f"hydra/launcher={option}", f"hydra.sweep.dir={tmp_path}", "seed=0,1"]
    monkeypatch.setattr(sys, "argv", words)
    assert main(lambda plan, folder: None) == 2
    assert (
        capsys.readouterr().err
        == f"Error: hydra/launcher needs more than is installed: pip install 'fedspa[{extra}]'.\n"
    )


# A job in a process of its own


@pytest.fixture
def job_process(monkeypatch):
    """As a launcher's process."""
    monkeypatch.setattr(launchers, "_ended", [])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_ends_a_job_and_all_after_it(job_process, tmp_path, number, code):
    with pytest.raises(JobFailed) as end, in_own_process(tmp_path):
        os.kill(os.getpid(), number)
        time.sleep(10)
    assert end.value.code == code
    with pytest.raises(JobFailed), in_own_process(tmp_path):
        raise AssertionError("no further job begins")


def test_the_console_of_a_job_goes_to_its_folder(job_process, tmp_path, capsys):
    with in_own_process(tmp_path):
        print("80 %")
    assert (tmp_path / CONSOLE).read_text() == "80 %\n"
    assert capsys.readouterr().out == ""


def test_a_signal_reaches_the_jobs():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    try:
        with pytest.raises(Preempted), jobs_get_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            child.join(30)
        assert child.exitcode == -signal.SIGTERM
    finally:
        child.kill()


# A machine with several GPUs


@pytest.mark.parametrize(
    ("given", "there", "seen"),
    [
        (None, 2, {"0": 2, "1": 2}),
        (None, 3, {"0": 1, "1": 2, "2": 1}),
        ("4,GPU-7a", 0, {"4": 2, "GPU-7a": 2}),
        (None, 1, {None: 4}),  # as it was
        (None, 0, {None: 4}),
        ("3", 8, {"3": 4}),
        ("", 8, {"": 4}),
    ],
)
def test_four_processes_go_round_the_gpus(given, there, seen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    found = []
    for number in range(1, 5):
        if given is None:
            monkeypatch.delenv(VISIBLE, raising=False)
        else:
            monkeypatch.setenv(VISIBLE, given)
        process = SimpleNamespace(name=f"LokyProcess-{number}")
        monkeypatch.setattr(multiprocessing, "current_process", lambda process=process: process)
        take_a_gpu()
        found.append(os.environ.get(VISIBLE))
        take_a_gpu()  # its next job
        assert os.environ.get(VISIBLE) == found[-1]
    assert Counter(found) == seen


# The tracking store


def test_four_processes_write_one_store_at_once(tmp_path):
    import mlflow  # noqa: F401  (imported before the fork: the children start at the same moment)

    uri = f"sqlite:///{tmp_path / 'new.db'}"
    together, rounds = multiprocessing.get_context("fork"), 30
    barrier = together.Barrier(4)

    def follow(folder: Path) -> None:
        folder.mkdir()
        tracker = Trackers([RunFolder(), MLflowTracker(tracking_uri=uri, flush_seconds=0.05)])
        barrier.wait()
        tracker.start(run_info(folder, rounds, name=folder.name))
        for round in range(1, rounds + 1):
            tracker.round(run_record(round))
        tracker.finish(run_result())

    processes = [together.Process(target=follow, args=(tmp_path / str(number),)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    client, experiment = open_store(uri, "fedspa")
    runs = client.search_runs([experiment])
    assert sorted((run.info.run_name, run.info.status) for run in runs) == [
        (str(n), "FINISHED") for n in range(4)
    ]
    for run in runs:
        points = client.get_metric_history(run.info.run_id, "accuracy/global")
        assert [point.step for point in points] == list(range(1, rounds + 1))


# Whole sweeps


@pytest.fixture
def store(tmp_path_factory):
    """A tracking store whose experiment keeps its files beside it, not in the project."""
    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder}/mlflow.db"
    client, _ = open_store(uri, "unused")
    client.create_experiment("fedspa", artifact_location=(folder / "fedspa").as_uri())
    return uri


def sweep(folder: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "src/train.py"), "-m", *TINY, f"hydra.sweep.dir={folder}", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, **options)


WITH_RAY = (
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray needs an environment of its own: docs/clusters.md"
    ),
)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("cores", marks=pytest.mark.slow),
        pytest.param("ray_cluster", marks=WITH_RAY),
    ],
)
def test_a_real_sweep_side_by_side(launcher, tmp_path, store):
    """Two jobs that train and one whose network cannot; then the same again, when nothing is left to do."""
    environment = os.environ | {"MLFLOW_TRACKING_URI": store}
    words = [f"hydra/launcher={launcher}"]
    if launcher == "cores":
        words.append("hydra.launcher.n_jobs=2")
    if launcher == "ray_cluster":
        words += ["hydra.launcher.ray.init.address=null", "hydra.launcher.ray.remote.num_cpus=1"]
    first = sweep(tmp_path, *words, "model=small_cnn,mlp,lenet5", env=environment)
    out, err = first.communicate(timeout=600)
    assert first.returncode == 2, err
    assert "\n1 of 3 jobs failed:\n  model=lenet5  model=lenet5 cannot take images of 8 x 8 pixels" in err
    assert [f"{count} of 3 jobs done, about " in out for count in (1, 2)] == [True] * 2
    assert "Everything lies in" not in out  # the jobs' own tables are in their folders
    folders = {path.parent.name: path.parent for path in tmp_path.glob("*/*/summary.json")}
    assert folders.keys() == {"model=small_cnn", "model=mlp"}
    for folder in folders.values():
        assert "Everything lies in" in (folder / CONSOLE).read_text()
        assert len((folder / "rounds.csv").read_text().splitlines()) == 1 + 2
        beside = {"cores": 2, "ray_cluster": launchers.usable_cores()}[launcher]
        cores = max(launchers.usable_cores() // beside, 1)
        assert f"  cores: {cores}\n" in (folder / "config.yaml").read_text()
        assert not (folder / "fedspa.log").exists()

    client, experiment = open_store(store, "fedspa")
    name = next(iter(folders.values())).parent.name
    (parent,) = client.search_runs([experiment], f"tags.sweep = '{name}'")
    nested = client.search_runs([experiment], f"tags.`{PARENT}` = '{parent.info.run_id}'")
    assert sorted((run.info.run_name, run.info.status) for run in nested) == [
        (model, "FINISHED") for model in ("mlp", "small_cnn")
    ]

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/summary.json")}
    second = sweep(tmp_path, *words, "model=small_cnn,mlp", env=environment)
    out, err = second.communicate(timeout=600)
    assert (second.returncode, "2 of them are finished already." in out) == (0, True), err
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["cores"])
@pytest.mark.parametrize(
    ("number", "to", "code"), [(signal.SIGINT, os.killpg, 130), (signal.SIGTERM, os.kill, 75)]
)
def test_a_signal_ends_a_whole_sweep_with_its_rounds_saved(launcher, number, to, code, tmp_path):
    """Ctrl-C, which a terminal sends to all of its processes; and what a scheduler sends to the first."""
    words = [f"hydra/launcher={launcher}", "logger=none", "federation.rounds=5000", "seed=0,1,2"]
    process = sweep(tmp_path, *words, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("*/*/rounds.csv")) or not all(
            file.read_text().count("\n") > 3 for file in tmp_path.glob("*/*/rounds.csv")
        ):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
        to(process.pid, number)
        assert process.wait(120) == code
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for folder in {path.parent for path in tmp_path.glob("*/*/rounds.csv")}:
        rounds = len((folder / "rounds.csv").read_text().splitlines()) - 1
        assert f"round-{rounds:06}" in max(file.name for file in (folder / "checkpoints").iterdir())
