"""Standard streams that are closed, or that cannot write every sign."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedspa.runs.streams import SPELT, take_any_streams

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_run_with_closed_streams_leaves_its_results(tmp_path: Path, closed: str) -> None:
    words = "logger=none federation.rounds=1 training.epochs=1 hardware.workers=1 hydra.run.dir=run"
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} {ROOT}/src/train.py {words} {closed}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "run/summary.json").read_text())["rounds"] == 1
    for file in (tmp_path / "run").glob("*.csv"):  # nothing of the console has got into a file
        assert "Accuracy of each kind" not in file.read_text()


def test_a_mistake_has_its_exit_code_where_nobody_can_hear_of_it(tmp_path: Path) -> None:
    command = f"{sys.executable} {ROOT}/src/train.py mask=dts hydra.run.dir=run 2>&-"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")


def test_signs_that_an_encoding_lacks_are_spelt(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    take_any_streams()
    print("88.89 ± 15.71 in 模型/M\udcfcller", flush=True)
    assert raw.getvalue() == b"88.89 +- 15.71 in \\u6a21\\u578b/M\\udcfcller\n"
    assert "M\udcfc".encode(errors=SPELT) == b"M\\udcfc"
