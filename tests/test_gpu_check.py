"""benchmarks/gpu_check.py on the CPU: all checks pass at tiny sizes, and those that find something wrong do not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from doc_pages import ROOT
from PIL import Image

sys.path.append(str(ROOT / "benchmarks"))

import gpu_check
import gpu_fast
import gpu_right
from gpu_base import Check, Options, Wrong, require

from fedspa.training import step
from fedspa.training.flat import sgd_step


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    """A folder in the form of CIFAR-10, with a few random pictures."""
    draws = np.random.default_rng(0)
    for name, count in (("train", 80), ("test", 40)):
        rows = []
        for _ in range(count):
            file = BytesIO()
            Image.fromarray(draws.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file, "PNG")
            rows.append({"bytes": file.getvalue(), "path": None})
        labels = [row % 10 for row in range(count)]
        pq.write_table(pa.table({"img": rows, "label": labels}), tmp_path / f"{name}.parquet")
    return tmp_path


WITHOUT_DATASETS = """
import runpy, sys
sys.modules["datasets"] = None  # a machine with a GPU may not have it
sys.path.insert(0, "benchmarks")
runpy.run_path("benchmarks/gpu_check.py", run_name="__main__")
"""


def run(*words: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the lines of the script."""
    command = [sys.executable, "-c", WITHOUT_DATASETS, "--tiny", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_every_check_passes_at_tiny_sizes(cifar10):
    code, lines = run("--cifar10", str(cifar10))
    assert [line for line in lines if not line["passed"]] == [] and code == 0
    assert len(lines) == len(gpu_check.CHECKS)
    assert {line["part"] for line in lines} == set(gpu_check.PARTS)


def test_without_cifar10_its_part_does_not_pass():
    code, lines = run("--parts", "accurate")
    assert code == 1 and len(lines) == 2
    assert all("--cifar10" in line["reason"] and not line["passed"] for line in lines)


def again() -> None:
    """Fails while another error is handled, as the end of a capture does."""
    try:
        _ = 1 // 0
    finally:
        raise ValueError("it ended")


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda options: require(False, "a wrong value", value=3), "a wrong value"),
        (lambda options: {"value": 1 // 0}, "ZeroDivisionError: integer division or modulo by zero"),
        (
            lambda options: again(),
            "ValueError: it ended; from ZeroDivisionError: integer division or modulo by zero",
        ),
        (lambda options: sys.exit(3), "its process ended with exit code 3"),
        (lambda options: time.sleep(60), "no result within 0.5 s"),
    ],
    ids=["wrong", "error", "errors", "end", "deadline"],
)
def test_a_check_that_fails_is_one_line(work, reason):
    line = gpu_check.outcome(Check("right", "it", 0.5 if "within" in reason else 60, work), Options())
    assert (line["passed"], line["reason"]) == (False, reason)
    assert line.get("value") == (3 if reason == "a wrong value" else None)


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        (0.5, "no result within 0.5 s, when the time for all checks was over"),
        (0.0, gpu_check.NOT_REACHED),
        (-1.0, gpu_check.NOT_REACHED),
    ],
)
def test_a_check_ends_with_the_time_for_all_checks(left, reason):
    line = gpu_check.outcome(Check("right", "it", 60, lambda options: time.sleep(60)), Options(), left)
    assert (line["passed"], line["reason"]) == (False, reason)


def test_a_run_without_time_names_each_check_that_it_does_not_reach():
    code, lines = run("--seconds", "0.001")
    assert code == 1 and len(lines) == len(gpu_check.CHECKS)
    assert {line["reason"] for line in lines[1:]} == {gpu_check.NOT_REACHED}


def test_a_step_without_weight_decay_is_found(plan, monkeypatch):
    def wrong(*tensors: Any) -> None:
        sgd_step(*tensors[:-1], replace(tensors[-1], weight_decay=0))

    monkeypatch.setattr(step, "sgd_step", wrong)
    with pytest.raises(Wrong, match="compiled is further from double precision"):
        gpu_right.agreement("lenet5", "64-true", Options(tiny=True))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("name", ["repeats", "dropout"])
def test_a_check_passes_at_the_size_for_a_gpu(plan, monkeypatch, name):
    words = ("engine=compiled", "engine.compiler=aot_eager", "hardware=cpu")
    monkeypatch.setattr(Options, "compiled", lambda self, *others: (*words, *others))
    next(check for check in gpu_right.CHECKS if check.name == name).run(Options())


def lenet5_fast(plan: Any) -> dict[str, Any]:
    """The line of this check at tiny sizes. `plan`: the fixture has registered the config."""
    check = next(each for each in gpu_check.CHECKS if each.name.startswith("lenet5"))
    return gpu_check.outcome(check, Options(tiny=True))


def test_a_goal_that_is_missed_fails(plan, monkeypatch):
    goal = gpu_fast.GOALS["lenet5"]
    monkeypatch.setitem(gpu_fast.GOALS, "lenet5", goal._replace(seconds=1e-9))
    line = lenet5_fast(plan("mask=dst"))
    assert not line["passed"] and line["reason"] == "a goal is missed by more than 110000 x"
    assert line["goal_s"] == 1e-9 and line["whole_run_s"] > 0


def test_an_engine_that_fell_back_fails(plan, monkeypatch):
    monkeypatch.setattr(Options, "compiled", lambda self, *words: ("engine=eager", "hardware=cpu", *words))
    line = lenet5_fast(plan("mask=dst"))
    assert not line["passed"] and line["reason"] == "auto fell back to another engine"
