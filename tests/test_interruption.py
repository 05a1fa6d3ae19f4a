"""Signals where nothing has to be saved: reports, syncs, and a sweep around its runs."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import report
import sync
from fedspa.runs.commands import main
from fedspa.runs.interruption import SIGNALS, Interruptions, Preempted, command

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}


def hit(number: int) -> None:
    os.kill(os.getpid(), number)


def in_a_fork(work: Callable[[], None]) -> int:
    """How a process ends that does this work: below 0, the signal that killed it."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            work()
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("program", [report.report, sync.sync])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)]
)
def test_a_report_and_a_sync_end_with_a_word_and_a_code(
    program, number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    monkeypatch.setattr(report, "read_options", lambda form, words: hit(number))
    monkeypatch.setattr("fedspa.tracking.mirror.Mirror", lambda folder: hit(number))
    monkeypatch.setattr(sys, "argv", ["program", "runs=here"])
    assert main(program, "usage") == code
    assert capsys.readouterr().err == "Stopped.\n"
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_a_reader_that_goes_away_ends_a_command(capfd: pytest.CaptureFixture[str]) -> None:
    program = "from fedspa.runs.interruption import command; raise SystemExit(command(lambda: print('x' * 99999))())"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        assert process.stdout
        process.stdout.close()
    assert process.returncode == 141 and capfd.readouterr().err == ""


def test_a_sign_that_an_encoding_lacks_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert command(lambda: print("88 ± 1") or 0)() == 0
    assert raw.getvalue() == b"88 ? 1\n"


def test_a_second_signal_ends_at_once() -> None:
    def twice() -> None:
        with Interruptions(anywhere=True):
            try:
                hit(signal.SIGTERM)
            finally:
                hit(signal.SIGINT)

    assert in_a_fork(twice) == -signal.SIGINT


def test_a_signal_that_was_lost_in_a_destructor_counts() -> None:
    class Deaf:
        def __del__(self) -> None:
            hit(signal.SIGINT)

    def twice() -> None:
        with Interruptions(anywhere=True), suppress(BaseException):
            Deaf()  # what is raised there, Python only prints
            hit(signal.SIGINT)

    assert in_a_fork(twice) == -signal.SIGINT


def test_a_run_that_nobody_interrupted_leaves_its_sweep_its_first_signal() -> None:
    with pytest.raises(Preempted), Interruptions(anywhere=True):
        with Interruptions():
            pass
        hit(signal.SIGTERM)
