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
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tracking_runs import run_info, run_record, run_result

from fedspa.cli import main
from fedspa.runs.interruption import Preempted
from fedspa.studies import gpu_places, launchers
from fedspa.studies.gpu_places import VISIBLE, take_a_gpu
from fedspa.studies.launchers import CONSOLE, Ended, Launching, beside_others
from fedspa.tracking.mlflow_page import PARENT
from fedspa.tracking.mlflow_store import MLflowTracker

ROOT = Path(__file__).resolve().parents[1]
TINY = [
    *("federation.rounds=2", "federation.clients=4", "federation.clients_per_round=2", "training.epochs=1"),
    "model=small_cnn",
]


@pytest.mark.parametrize(
    ("kind", "options", "jobs", "expected"),
    [
        ("BasicLauncher", {}, 9, Launching()),
        ("JoblibLauncher", {"n_jobs": -1}, 9, Launching(True, True, None, 1)),
        ("JoblibLauncher", {"n_jobs": -1}, 3, Launching(True, True, None, 2)),
        ("JoblibLauncher", {"n_jobs": -5}, 9, Launching(True, True, None, 2)),  # all cores but four
        ("JoblibLauncher", {"n_jobs": 2}, 9, Launching(True, True, None, 4)),
        ("JoblibLauncher", {"n_jobs": 100}, 100, Launching(True, True, None, 1)),
        ("JoblibLauncher", {"n_jobs": None}, 9, Launching(True, True, None, 8)),  # one at a time
        ("LocalLauncher", {}, 20, Launching(True, True, 8, 1)),
        ("LocalLauncher", {}, 3, Launching(True, True, 3, 2)),
        ("SlurmLauncher", {"cpus_per_task": 6}, 20, Launching(True, cores=6)),
        ("RayLauncher", {"ray": {"remote": {"num_cpus": 3}}}, 20, Launching(True, cores=3)),
        ("SomebodysLauncher", {}, 20, Launching(True)),
    ],
)
def test_eight_cores_are_shared_out(kind, options, jobs, expected, monkeypatch):
    monkeypatch.setattr(launchers, "usable_cores", lambda: 8)
    assert Launching.by({"_target_": f"hydra_plugins.some.{kind}", **options}, jobs) == expected


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
    """As a launcher's process: its signals are put back afterwards."""
    monkeypatch.setattr(launchers, "_ended", [])
    before = {number: signal.getsignal(number) for number in launchers.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_ends_a_job_and_all_after_it(job_process, tmp_path, number, code):
    with pytest.raises(Ended) as end, beside_others(tmp_path):
        os.kill(os.getpid(), number)
        time.sleep(10)
    assert end.value.code == code
    with pytest.raises(Ended), beside_others(tmp_path):
        raise AssertionError("no further job begins")


def test_a_signal_between_two_jobs_ends_nothing_but_is_remembered(job_process, tmp_path):
    with beside_others(tmp_path):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Ended), beside_others(tmp_path):
        raise AssertionError("no further job begins")


def test_what_a_job_says_goes_to_its_folder(job_process, tmp_path, capsys):
    with beside_others(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    with beside_others(tmp_path):
        print("80 %")
    assert (tmp_path / CONSOLE).read_text() == "80 %\n"
    assert capsys.readouterr().out == ""


def test_a_signal_reaches_the_jobs_though_one_has_just_ended(job_process, monkeypatch):
    """The one that ended was still there when the processes were listed."""
    gone, child = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    gone.kill()
    gone.wait()
    monkeypatch.setattr(launchers, "_descendants", lambda process: [gone.pid, child.pid])
    try:
        with pytest.raises(Preempted), launchers._told_to_end():
            os.kill(os.getpid(), signal.SIGTERM)
            assert child.wait(30) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()


def test_a_process_that_watches_over_a_job_gets_no_signal_and_this_one_does():
    """submitit's would send Ctrl-C to its job once more, and kill it a second later."""
    tell = "import signal; print(*sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))))"
    with pytest.raises(Preempted), launchers._told_to_end() as told, launchers._kept_from_children():
        child = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True)
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 30
        while not told:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert child.stdout.split() == [str(int(number)) for number in sorted(launchers.SIGNALS)]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_job_lets_the_signals_through(job_process, tmp_path):
    signal.pthread_sigmask(signal.SIG_BLOCK, launchers.SIGNALS)
    with pytest.raises(Ended), beside_others(tmp_path):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)


def test_descendants_are_found():
    child = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    try:
        deadline = time.monotonic() + 30
        while len(below := launchers._descendants(child.pid)) < 1:
            assert time.monotonic() < deadline
        assert child.pid in launchers._descendants(os.getpid())
        assert set(below) <= set(launchers._descendants(os.getpid()))
    finally:
        for process in [*launchers._descendants(child.pid), child.pid]:
            os.kill(process, signal.SIGKILL)
        child.wait()


# A machine with several GPUs


@pytest.mark.parametrize(
    ("told", "there", "seen"),
    [
        (None, 2, {"0": 2, "1": 2}),
        (None, 3, {"0": 2, "1": 1, "2": 1}),
        ("4,GPU-7a", 0, {"4": 2, "GPU-7a": 2}),
        (None, 1, {None: 4}),  # as it was
        (None, 0, {None: 4}),
        ("3", 8, {"3": 4}),
        ("", 8, {"": 4}),
    ],
)
def test_four_processes_go_round_the_gpus(told, there, seen, tmp_path, monkeypatch):
    together = multiprocessing.get_context("fork")
    queue, barrier = together.SimpleQueue(), together.Barrier(4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)

    def process() -> None:
        os.environ.pop(VISIBLE, None)
        if told is not None:
            os.environ[VISIBLE] = told
        take_a_gpu(tmp_path)
        first = os.environ.get(VISIBLE)
        barrier.wait(60)  # nobody has ended yet
        take_a_gpu(tmp_path)  # its next job
        queue.put((first, os.environ.get(VISIBLE)))

    for _ in range(2):  # the places of those that have ended are free again
        processes = [together.Process(target=process) for _ in range(4)]
        for each in processes:
            each.start()
        for each in processes:
            each.join(120)
        found = [queue.get() for _ in processes]
        assert Counter(first for first, _ in found) == seen
        assert all(first == second for first, second in found)


def test_a_job_beside_others_takes_its_gpu_first(job_process, tmp_path, monkeypatch):
    monkeypatch.setattr(Launching, "by", lambda launcher, jobs: Launching(True, True))
    monkeypatch.setattr(gpu_places, "_places", [])
    monkeypatch.setenv(VISIBLE, "5,6")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    words = ["train.py", "-m", f"hydra.sweep.dir={tmp_path}", "logger=none", "seed=0,1"]
    monkeypatch.setattr(sys, "argv", words)
    seen = []
    assert main(lambda plan, folder: seen.append(os.environ[VISIBLE])) == 0
    assert seen == ["5", "5"]


# The tracking store


def test_four_processes_write_one_store_at_once(tmp_path):
    import mlflow  # noqa: F401  (imported before the fork: the children start at the same moment)

    uri = f"sqlite:///{tmp_path / 'new.db'}"
    together, rounds = multiprocessing.get_context("fork"), 30
    barrier = together.Barrier(4)

    def follow(folder: Path) -> None:
        folder.mkdir()
        tracker = MLflowTracker(tracking_uri=uri, flush_rounds=1)
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
    client, experiment = MLflowTracker(tracking_uri=uri).open_store()
    runs = client.search_runs([experiment])
    assert sorted((run.info.run_name, run.info.status) for run in runs) == [
        (str(n), "FINISHED") for n in range(4)
    ]
    for run in runs:
        points = client.get_metric_history(run.info.run_id, "global/accuracy_mean")
        assert [point.step for point in points] == list(range(1, rounds + 1))


# Whole sweeps


@pytest.fixture
def store(tmp_path_factory):
    """A tracking store whose experiment keeps its files beside it, not in the project."""
    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder}/mlflow.db"
    client, _ = MLflowTracker(tracking_uri=uri, experiment="unused").open_store()
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
        pytest.param("submitit_local", marks=pytest.mark.slow),
        pytest.param("ray_cluster", marks=WITH_RAY),
    ],
)
def test_a_real_sweep_side_by_side(launcher, tmp_path, store):
    """Three jobs that train and one that cannot; then the same again, when nothing is left to do."""
    environment = os.environ | {"MLFLOW_TRACKING_URI": store}
    words = [f"hydra/launcher={launcher}"]
    if launcher == "cores":
        words.append("hydra.launcher.n_jobs=2")
    if launcher == "ray_cluster":
        words += ["hydra.launcher.ray.init.address=null", "hydra.launcher.ray.remote.num_cpus=1"]
    first = sweep(tmp_path, *words, "seed=0,1,2,-1", env=environment)
    out, err = first.communicate(timeout=600)
    assert first.returncode == 2, err
    assert err.endswith("1 of 4 jobs failed:\n  seed=-1  seed=-1 is out of range: it must be at least 0.\n")
    assert [f"{count} of 4 done: seed=" in out for count in (1, 2, 3)] == [True] * 3
    assert "Everything lies in" not in out  # the jobs' own tables are in their folders
    folders = {path.parent.name: path.parent for path in tmp_path.glob("*/*/summary.json")}
    assert folders.keys() == {"seed=0", "seed=1", "seed=2"}
    for folder in folders.values():
        assert "Everything lies in" in (folder / CONSOLE).read_text()
        assert len((folder / "rounds.csv").read_text().splitlines()) == 1 + 2
        beside = {"cores": 2, "submitit_local": 4, "ray_cluster": launchers.usable_cores()}[launcher]
        cores = max(launchers.usable_cores() // beside, 1)
        assert f"  cores: {cores}\n" in (folder / "config.yaml").read_text()
        assert not (folder / "fedspa.log").exists()

    client, experiment = MLflowTracker(tracking_uri=store).open_store()
    name = next(iter(folders.values())).parent.name
    (parent,) = client.search_runs([experiment], f"tags.sweep = '{name}'")
    nested = client.search_runs([experiment], f"tags.`{PARENT}` = '{parent.info.run_id}'")
    assert sorted((run.data.tags["seed"], run.info.status) for run in nested) == [
        (seed, "FINISHED") for seed in "012"
    ]

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/summary.json")}
    second = sweep(tmp_path, *words, "seed=0,1,2", env=environment)
    out, err = second.communicate(timeout=600)
    assert (second.returncode, "3 of them are finished already." in out) == (0, True), err
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["cores", "submitit_local"])
@pytest.mark.parametrize(
    ("number", "to", "code"), [(signal.SIGINT, os.killpg, 130), (signal.SIGTERM, os.kill, 75)]
)
def test_a_signal_ends_a_whole_sweep_with_its_rounds_saved(launcher, number, to, code, tmp_path):
    """Ctrl-C, which a terminal sends to all of its processes; and what a scheduler sends to the first."""
    words = [f"hydra/launcher={launcher}", "logger=none", "federation.rounds=100000", "seed=0,1,2"]
    process = sweep(tmp_path, *words, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("*/*/rounds.csv")) or not all(
            file.read_text().count("\n") > 3 for file in tmp_path.glob("*/*/rounds.csv")
        ):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
        below = launchers._descendants(process.pid)
        to(process.pid, number)
        assert process.wait(120) == code
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{child}").exists() for child in below):
            assert time.monotonic() < deadline
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for folder in {path.parent for path in tmp_path.glob("*/*/rounds.csv")}:
        rounds = len((folder / "rounds.csv").read_text().splitlines()) - 1
        assert f"round-{rounds:06}" in max(file.name for file in (folder / "checkpoints").iterdir())
