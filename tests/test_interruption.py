"""Signals where nothing has to be saved: reports, deliveries, and a sweep around its runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress

import pytest

import deliver
import report
from fedspa.runs.interruption import SIGNALS, Interruptions, Preempted, Preemptible, ends_when_interrupted
from fedspa.runs.streams import ReaderGone


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


@pytest.mark.parametrize("command", [report, deliver])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)]
)
def test_a_report_and_a_delivery_end_with_a_word_and_a_code(
    command, number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    monkeypatch.setattr("fedspa.report.options.parse", lambda words: hit(number))
    monkeypatch.setattr(report, "parse", lambda words: hit(number))
    monkeypatch.setattr("fedspa.tracking.undelivered.Undelivered.load", lambda folder: hit(number))
    assert command.main(["runs=here"]) == code
    assert capsys.readouterr().err == "Stopped.\n"
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_a_reader_that_goes_away_is_no_interruption() -> None:
    @ends_when_interrupted
    def main() -> int:
        raise ReaderGone

    with pytest.raises(ReaderGone):
        main()


def test_a_second_signal_ends_at_once() -> None:
    def twice() -> None:
        with Preemptible():
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
        with Preemptible(), suppress(BaseException):
            Deaf()  # what is raised there, Python only prints
            hit(signal.SIGINT)

    assert in_a_fork(twice) == -signal.SIGINT


def test_a_signal_to_a_run_is_the_first_of_its_sweep_too() -> None:
    def twice() -> None:
        with Preemptible():
            try:
                with Interruptions() as run, run.allowed():
                    hit(signal.SIGTERM)
            except Preempted:
                hit(signal.SIGUSR1)

    assert in_a_fork(twice) == -signal.SIGUSR1


def test_a_run_that_nobody_interrupted_leaves_its_sweep_its_first_signal() -> None:
    with pytest.raises(Preempted), Preemptible():
        with Interruptions():
            pass
        hit(signal.SIGTERM)
