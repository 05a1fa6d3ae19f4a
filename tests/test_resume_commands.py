"""Going on with a run from the command line: killed and preempted commands, resume=auto, and half-done sweeps."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_resume import ONE, ROOT, TINY, files, rows, saved_round

from fedspa.checkpoints import resuming
from fedspa.cli import main
from fedspa.config import schema
from fedspa.core.server import Aggregate
from fedspa.federated.aggregation import Aggregator
from fedspa.runs.experiment import run
from train import train

Command = Callable[..., int]


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder outputs/ of a project that has nothing in it yet."""
    for module in (schema, resuming):
        monkeypatch.setattr(module, "project_root", lambda: tmp_path)
    return tmp_path / "outputs"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """`command("resume=auto")`: the exit code of that command line, run in this process."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # `main` sets it; so pytest puts it back
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # Hydra's would outlive the run's folder

    def command(*words: str) -> int:
        options = [word for word in words if word == "-m"]  # they come first
        settings = [*TINY, ONE, "resume=null", *words[len(options) :]]
        monkeypatch.setattr(sys, "argv", ["train.py", *options, *settings])
        return main(train)

    return command


def at_merge(number: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something at the n-th merge from now on."""
    result, left = Aggregator.result, [number]

    def watched(self: Aggregator) -> Aggregate | None:
        left[0] -= 1
        if left[0] == 0:
            act()
        return result(self)

    monkeypatch.setattr(Aggregator, "result", watched)


def preempt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_auto_goes_on_with_the_newest_run_of_the_same_settings(
    command: Command, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_merge(3, preempt, monkeypatch)
    assert command("resume=auto") == 75  # there is none yet: it began anew
    assert capsys.readouterr().err.endswith("Preempted: the same command with resume=auto goes on.\n")
    (folder,) = outputs.glob("*/*")
    assert len(rows(folder)) == saved_round(folder) == 2

    assert command("resume=auto", "seed=1") == 0  # other settings, another run
    other = next(path for path in outputs.glob("*/*") if path != folder)
    assert len(rows(other)) == 4

    assert command("resume=auto", "federation.rounds=4", "name=another", "checkpoint.every=3") == 0
    shown = capsys.readouterr().out
    assert "Goes on after round 2" in shown and len(rows(folder)) == 4
    assert set(outputs.glob("*/*")) == {folder, other}

    before = files(folder)
    assert command("resume=auto") == 0
    assert capsys.readouterr().out == f"Finished already: {folder}\n"
    assert files(folder) == before and set(outputs.glob("*/*")) == {folder, other}


def test_a_folder_can_be_named(
    command: Command,
    outputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    at_merge(2, preempt, monkeypatch)
    assert command(f"hydra.run.dir={tmp_path}/mine") == 75
    assert command(f"resume={tmp_path}/mine", "seed=1") == 2
    assert "holds a run with other settings: seed (0 there, 1 here)." in capsys.readouterr().err
    assert command(f"resume={tmp_path}/yours") == 2
    assert f"resume={tmp_path}/yours holds no run" in capsys.readouterr().err
    assert command(f"hydra.run.dir={tmp_path}/mine", "resume=auto", "seed=1") == 2
    assert command(f"resume={tmp_path}/mine") == 0
    assert len(rows(tmp_path / "mine")) == 4
    assert not outputs.exists() or not any(outputs.iterdir())


def test_a_sweep_goes_on_with_half_done_jobs(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sweep(root: str) -> int:
        return command("-m", "seed=0,1", f"hydra.sweep.dir={tmp_path}/{root}")

    assert sweep("whole") == 0
    (whole,) = (tmp_path / "whole").glob("*/")
    at_merge(6, preempt, monkeypatch)
    assert sweep("broken") == 75
    broken = tmp_path / "broken" / whole.name
    assert {path.name for path in broken.iterdir()} == {"seed=0", "seed=1"}
    assert len(rows(broken / "seed=1")) == saved_round(broken / "seed=1") == 1
    capsys.readouterr()
    assert sweep("broken") == 0
    told = capsys.readouterr().out
    assert "1 of them are finished already.\n1 of them go on from a checkpoint.\n" in told
    for job in ("seed=0", "seed=1"):
        assert files(broken / job) == files(whole / job)
    assert not (broken / "set_aside").exists()


def test_a_sweep_resumes_by_itself(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("-m", "seed=0,1", f"hydra.sweep.dir={tmp_path}", f"resume={tmp_path}") == 2
    assert "names one run, but a sweep goes on with all of its own" in capsys.readouterr().err


LONG = ("federation.rounds=16", "checkpoint.every=2")


class Started:
    """A whole command, on its way in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        program = [sys.executable, str(ROOT / "src/train.py"), *TINY, "hardware.workers=2", *LONG]
        self._process = subprocess.Popen(
            [*program, f"hydra.run.dir={folder}"],
            cwd=folder.parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def after(self, round: int, *signals: int) -> int:
        """Send signals once so many rounds are told of; the exit status."""
        deadline = time.monotonic() + 120
        while (
            len(rows(self._folder)) < round and self._process.poll() is None and time.monotonic() < deadline
        ):
            time.sleep(0.002)
        for number in signals:
            self._process.send_signal(number)
        return self._process.wait(timeout=120)


@pytest.mark.slow
def test_whole_commands_that_are_killed_and_preempted_leave_the_same_bytes(
    plan: Callable, tmp_path: Path
) -> None:
    run(plan(*TINY, ONE, *LONG), tmp_path / "whole")
    folder = tmp_path / "run"
    assert Started(folder).after(4, signal.SIGKILL) == -signal.SIGKILL
    assert Started(folder).after(8, signal.SIGTERM) == 75
    assert len(rows(folder)) == saved_round(folder) < 16
    # Two signals that come before Python handles the first one count as one.
    assert Started(folder).after(12, signal.SIGUSR1, signal.SIGTERM) in (-signal.SIGTERM, 75)
    assert Started(folder).after(17) == 0
    assert {**files(folder), "config.yaml": b""} == {**files(tmp_path / "whole"), "config.yaml": b""}
