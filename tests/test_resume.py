"""A run that is killed and goes on leaves, byte for byte, what it leaves when nobody kills it."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data_files import OF_FILES, write_data
from kill_points import POINTS, count, run_until
from safetensors.torch import load_file

from fedspa.checkpoints.archive import read
from fedspa.checkpoints.checkpoint import Checkpoints, checkpoint_files
from fedspa.checkpoints.resuming import occupied, place
from fedspa.config.plan import Plan
from fedspa.core.errors import UserError
from fedspa.federated.aggregation import Aggregator
from fedspa.runs.experiment import run

ROOT = Path(__file__).resolve().parents[1]
TINY = (
    "dataset=synthetic",
    "dataset.train_size=60",
    "dataset.test_size=40",
    "dataset.image_size=8",
    "dataset.classes=3",
    "dataset.client_test_images=6",
    "partition.min_size=4",
    "federation.clients=5",
    "federation.clients_per_round=2",
    "federation.rounds=4",
    "training.epochs=1",
    "training.batch_size=8",
    "finetune.epochs=1",
    "logger=none",
    "hardware=cpu",
    "engine=eager",
    "resume=auto",
)
ONE, TWO = "hardware.workers=1", "hardware.workers=2"
FILES = (*OF_FILES, *TINY[TINY.index("federation.clients=5") :], "partition=iid", ONE)
RUNS: dict[str, tuple[str, ...]] = {
    "fedspa+dst": (ONE, "mask.initial=different", "checkpoint.every=1", "save.local=true", "theory.every=1"),
    "fedspa+dst, on the wire, two workers": (TWO, "federation.wire=fp32", "checkpoint.every=2"),
    "fedspa+rsm": (ONE, "mask=rsm", "checkpoint.every=3"),
    "fedspa+set, eight rounds a checkpoint": (ONE, "mask.regrow=random", "checkpoint.every=8"),
    "fedavg": (ONE, "method=fedavg", "checkpoint.every=1", "checkpoint.keep=1"),
    "ditto": (
        ONE,
        "method=ditto",
        "method.shared_epochs=1",
        "method.personal_epochs=1",
        "training.epochs=2",
        "checkpoint.every=2",
    ),
    "local, two workers": (TWO, "method=local", "save.local=true", "checkpoint.every=1"),
    "subfedavg": (
        ONE,
        "method=subfedavg",
        "training.epochs=2",
        "method.accuracy_threshold=0.1",
        "checkpoint.every=1",
    ),
    "subsampling, with faults": (ONE, "method=subsampling", "faults.dropout=0.3", "checkpoint.every=2"),
    "fedspa+channels, on the wire, two workers": (
        *(TWO, "mask=channels", "mask.initial=different", "federation.wire=fp32", "checkpoint.every=1"),
    ),
}
KILLS_A_RUN = 4
NOT_COMPARED = ("timing.csv", "summary.json", ".lock")
"""Wall-clock seconds differ. What else the summary has is compared beside them."""


def files(folder: Path) -> dict[str, Any]:
    """What a finished run left, but for the seconds."""
    found: dict[str, Any] = {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.is_file() and path.name not in NOT_COMPARED
    }
    summary = json.loads((folder / "summary.json").read_text())
    return found | {
        "summary": {
            key: summary[key]
            for key in summary
            if not key.startswith("time/") and key != "final/samples_per_s"
        }
    }


def rows(folder: Path, table: str = "rounds.csv") -> list[str]:
    path = folder / table
    return path.read_text().splitlines()[1:] if path.exists() else []


def saved_round(folder: Path) -> int:
    """The completed rounds in the newest checkpoint."""
    return read(checkpoint_files(folder / "checkpoints")[0])["round"]


def left_of(folder: Path) -> list[str]:
    """The checkpoints in the folder of a run."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def deal(run: str) -> list[str]:
    """The kinds of points at which a run is killed: all kinds in turn, in an order drawn from a seed."""
    kinds = [*POINTS, "bytes"]
    random.Random(7).shuffle(kinds)
    first = KILLS_A_RUN * list(RUNS).index(run)
    return [kinds[place % len(kinds)] for place in range(first, first + KILLS_A_RUN)]


# Killed, and gone on with


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_that_goes_on_leaves_the_same_bytes(
    plan: Callable[..., Plan], tmp_path: Path, name: str
) -> None:
    """Ten runs, each killed at four points of its life."""
    tiny = plan(*TINY, *RUNS[name])
    seen = count(tiny, tmp_path / "whole")
    expected = files(tmp_path / "whole")
    assert set(seen) >= {"merge", "table", "fsync", "rename", "bytes", "end"}
    source = random.Random(name)
    for kind in deal(name):
        point = kind if kind in seen else "merge"
        number, folder = source.randint(1, seen[point]), tmp_path / kind
        assert run_until(tiny, folder, point, number) == -signal.SIGKILL
        if not place(tiny, folder, given=True).finished:
            run(tiny, folder)
        assert files(folder) == expected, f"killed in {point} number {number}"
        assert len(rows(folder, "timing.csv")) == 4
        assert left_of(folder) == ["last.ckpt"]


@pytest.mark.parametrize(("point", "finished"), [("rename", False), ("fsync", True)])
def test_a_run_is_finished_once_its_last_checkpoint_has_its_name(
    plan: Callable[..., Plan], tmp_path: Path, point: str, finished: bool
) -> None:
    """The summary is there at both points. The last rename says that nothing is left to do."""
    tiny = plan(*TINY, ONE, "checkpoint.every=1")
    last = count(tiny, tmp_path / "whole")[point]
    folder = tmp_path / "run"
    assert run_until(tiny, folder, point, last) == -signal.SIGKILL
    assert (folder / "summary.json").exists()
    assert place(tiny, folder, given=True) == (folder, finished)
    if not finished:
        run(tiny, folder)
    assert files(folder) == files(tmp_path / "whole") and left_of(folder) == ["last.ckpt"]
    assert place(tiny, folder, given=True) == (folder, True)


def test_there_are_enough_kills_of_every_kind() -> None:
    assert {kind for name in RUNS for kind in deal(name)} == {*POINTS, "bytes"}
    assert sum(len(deal(name)) for name in RUNS) >= 30


def test_a_run_may_be_killed_again_and_again_and_change_its_workers(
    plan: Callable[..., Plan], tmp_path: Path
) -> None:
    words = RUNS["fedspa+dst"]
    run(plan(*TINY, *words), tmp_path / "whole")
    one, two = plan(*TINY, *words), plan(*TINY, *words, TWO)
    for tiny, point, number in [
        (one, "merge", 2),
        (one, "training", 3),
        (two, "merge", 1),
        (one, "bytes", 4),
        (two, "results", 2),
    ]:
        assert run_until(tiny, tmp_path / "run", point, number) == -signal.SIGKILL
    run(one, tmp_path / "run")
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def test_a_validation_set_keeps_the_best(plan: Callable[..., Plan], tmp_path: Path) -> None:
    """The best checkpoint is that of the highest mean accuracy of the personal models on validation rows."""
    tiny = plan(*TINY, ONE, "dataset.val_fraction=0.3", "checkpoint.every=1", "dataset.train_size=120")
    run(tiny, tmp_path / "whole")
    header, *table = [
        line.split(",") for line in (tmp_path / "whole" / "rounds.csv").read_text().splitlines()
    ]
    scores = [float(row[header.index("val_accuracy/personal")]) for row in table]
    best = scores.index(max(scores)) + 1

    def best_of(folder: Path) -> dict[str, Any]:
        assert left_of(folder) == ["best.ckpt", "last.ckpt"]
        return read(folder / "checkpoints" / "best.ckpt")

    assert (best_of(tmp_path / "whole")["round"], best_of(tmp_path / "whole")["best"]) == (best, max(scores))
    assert run_until(tiny, tmp_path / "run", "merge", 4) == -signal.SIGKILL
    run(tiny, tmp_path / "run")
    assert best_of(tmp_path / "run")["round"] == best


@pytest.mark.parametrize(
    "words",
    [
        ("engine=compiled", "engine.compiler=null"),
        ("hardware.precision=bf16-mixed",),
        ("engine=compiled", "engine.compiler=null", "hardware.precision=bf16-mixed"),
    ],
)
def test_other_engines_and_precisions_go_on_within_their_tolerance(
    plan: Callable[..., Plan], tmp_path: Path, words: tuple[str, ...]
) -> None:
    given = {word.partition("=")[0] for word in words}
    base = [word for word in (*TINY, ONE) if word.partition("=")[0] not in given]
    tiny = plan(*base, *words, "checkpoint.every=1")
    run(tiny, tmp_path / "whole")
    assert run_until(tiny, tmp_path / "cut", "merge", 3) == -signal.SIGKILL
    assert saved_round(tmp_path / "cut") == 2
    run(tiny, tmp_path / "cut")
    whole, cut = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "cut"))
    torch.testing.assert_close(cut, whole, rtol=1e-3, atol=1e-5)
    assert [row.split(",")[0] for row in rows(tmp_path / "cut")] == ["1", "2", "3", "4"]


# Asked to end, or failing


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
@pytest.mark.parametrize("words", [(ONE,), (TWO,)])
def test_a_signal_drops_the_round_and_saves_the_one_before(
    plan: Callable[..., Plan], tmp_path: Path, number: int, code: int, words: tuple[str, ...]
) -> None:
    tiny = plan(*TINY, *words)
    run(tiny, tmp_path / "whole")
    folder = tmp_path / "run"
    assert run_until(tiny, folder, "merge", 3, lambda: os.kill(os.getpid(), number)) == code
    assert len(rows(folder)) == saved_round(folder) == 2
    run(tiny, folder)
    assert files(folder) == files(tmp_path / "whole")


def test_a_signal_between_rounds_waits_for_the_row_to_be_written(
    plan: Callable[..., Plan], tmp_path: Path
) -> None:
    tiny = plan(*TINY, ONE)
    assert run_until(tiny, tmp_path, "table", 3, lambda: os.kill(os.getpid(), signal.SIGTERM)) == 75
    assert len(rows(tmp_path)) == len(rows(tmp_path, "timing.csv")) == saved_round(tmp_path) == 2


def test_a_second_signal_ends_at_once(plan: Callable[..., Plan], tmp_path: Path) -> None:
    def twice() -> None:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)

    assert run_until(plan(*TINY, ONE), tmp_path, "table", 3, twice) == -signal.SIGTERM
    assert saved_round(tmp_path) < 2


@pytest.mark.parametrize("words", [(ONE,), (TWO,)])
def test_a_run_that_fails_saves_its_last_complete_round(
    plan: Callable[..., Plan], tmp_path: Path, words: tuple[str, ...]
) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    tiny = plan(*TINY, *words, "checkpoint.every=9")
    run(tiny, tmp_path / "whole")
    for point, number in [("merge", 4), ("table", 3)]:  # in a round; and half-way through telling of one
        assert run_until(tiny, tmp_path / point, point, number, fail) == 1
        assert saved_round(tmp_path / point) == (3 if point == "merge" else 1)
        run(tiny, tmp_path / point)
        assert files(tmp_path / point) == files(tmp_path / "whole")


def test_a_last_save_that_fails_does_not_hide_why_the_run_ends(
    plan: Callable[..., Plan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    merges = [Aggregator.result]  # that of the first round

    def fail(self: Aggregator, *args: Any) -> Any:
        if merges:
            return merges.pop()(self, *args)
        monkeypatch.setattr(Checkpoints, "write", no_room)
        raise ZeroDivisionError("the reason")

    def no_room(self: Checkpoints, *args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Aggregator, "result", fail)
    with pytest.raises(ZeroDivisionError, match="the reason"):
        run(plan(*TINY, ONE, "checkpoint.every=9"), tmp_path)
    assert "The last complete round could not be saved: [Errno 28] No space left on device" in caplog.text


def test_a_run_that_had_no_room_goes_on_once_there_is_some(plan: Callable[..., Plan], tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tiny = plan(*TINY, ONE, "checkpoint.every=1")
    seen = count(tiny, tmp_path / "whole")
    for point in ("table", "bytes", "fsync", "rename", "results"):
        folder = tmp_path / point
        assert run_until(tiny, folder, point, (2 * seen[point] + 2) // 3, full) == 1
        run(tiny, folder)
        assert files(folder) == files(tmp_path / "whole")


# What cannot go on


def test_a_damaged_checkpoint_is_left_out_and_with_none_left_the_run_is_refused(
    plan: Callable[..., Plan], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = plan(*TINY, ONE, "checkpoint.every=1")
    run(tiny, tmp_path / "whole")
    folder = tmp_path / "run"
    run_until(tiny, folder, "merge", 4)
    newest, older = checkpoint_files(folder / "checkpoints")
    whole = older.read_bytes()
    for path in (newest, older):
        path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for resume in ("auto", str(folder)):
        with pytest.raises(UserError, match=f"No checkpoint in .* move {folder} away to begin the run again"):
            run(plan(*TINY, ONE, "checkpoint.every=1", f"resume={resume}"), folder)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    older.write_bytes(whole)
    caplog.clear()
    run(tiny, folder)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "damaged, cut short, or no checkpoint of fedspa: its checksum is wrong" in caplog.text
    assert files(folder) == files(tmp_path / "whole")


def test_a_checkpoint_of_another_run_is_refused_by_what_differs(
    plan: Callable[..., Plan], tmp_path: Path
) -> None:
    run_until(plan(*TINY, ONE), tmp_path, "merge", 3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for word, differs in {
        "seed=1": "seed (0 there, 1 here)",
        "model=lenet5 dataset.image_size=16": "model.name (small_cnn there, lenet5 here)",
        "method=fedavg": "method.name (fedspa there, fedavg here)",
        "partition.gamma=9.0": "partition.gamma (0.3 there, 9.0 here)",
        "dataset.noise=2.0": "dataset.noise (1.0 there, 2.0 here)",
        "save.local=true": "save.local (False there, True here)",
        "hardware.precision=64-true": "hardware.precision (32-true there, 64-true here)",
    }.items():
        other = plan(*TINY, ONE, *word.split())
        with pytest.raises(UserError) as refused:
            run(other, tmp_path)
        assert differs in str(refused.value)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_other_data_is_refused(plan: Callable[..., Plan], tmp_path: Path) -> None:
    """With clients of the same rows: `iid` deals them without a look at the labels."""
    write_data(tmp_path / "data", 0)
    tiny = plan(*FILES, f"dataset.path={tmp_path}/data")
    run_until(tiny, tmp_path / "run", "merge", 2)
    write_data(tmp_path / "data", 1)
    with pytest.raises(
        UserError, match=r"other images or labels \(data hash \w+ there, \w+ here\): dataset.path"
    ):
        run(tiny, tmp_path / "run")
    write_data(tmp_path / "moved", 0)
    assert run(plan(*FILES, f"dataset.path={tmp_path}/moved"), tmp_path / "run")["rounds"] == 4


def test_a_finished_run_on_other_data_is_not_this_one(
    plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedspa.checkpoints.resuming.project_root", lambda: tmp_path)
    folder = tmp_path / "outputs" / "day" / "hour"
    write_data(tmp_path / "data", 0)
    tiny = plan(*FILES, f"dataset.path={tmp_path}/data")
    run(tiny, folder)
    with monkeypatch.context() as unread:
        unread.setattr(type(tiny.dataset), "load", None)
        assert place(tiny, folder, given=True) == (folder, True)
    os.utime(tmp_path / "data" / "train-labels-idx1-ubyte")  # the same labels, written again
    assert place(tiny, folder, given=True) == (folder, True)
    write_data(tmp_path / "moved", 0)
    moved = plan(*FILES, f"dataset.path={tmp_path}/moved")
    assert place(moved, tmp_path / "new", given=False) == (folder, True)

    write_data(tmp_path / "data", 1)
    tiny = plan(*FILES, f"dataset.path={tmp_path}/data")  # a data set is read once
    with pytest.raises(UserError, match="finished run on other images or labels than dataset=mnist has now"):
        place(tiny, folder, given=True)
    assert place(tiny, tmp_path / "new", given=False) == (tmp_path / "new", False)


def test_auto_passes_over_what_would_be_refused(
    plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedspa.checkpoints.resuming.project_root", lambda: tmp_path)
    folder = tmp_path / "outputs" / "day" / "hour"
    run_until(plan(*TINY, ONE), folder, "merge", 2)
    assert place(plan(*TINY, TWO, "name=another"), tmp_path / "new", given=False) == (folder, False)
    for other in ("save.local=true", "theory.every=1", "hardware.precision=64-true"):
        assert place(plan(*TINY, ONE, other), tmp_path / "new", given=False) == (tmp_path / "new", False)


def test_two_runs_in_one_folder_are_refused(plan: Callable[..., Plan], tmp_path: Path) -> None:
    with occupied(tmp_path), pytest.raises(UserError, match="A run is going on in .* already"):
        run(plan(*TINY, ONE), tmp_path)
    assert list(tmp_path.iterdir()) == []
    run(plan(*TINY, ONE), tmp_path)


def test_without_resume_a_folder_with_a_run_is_refused(plan: Callable[..., Plan], tmp_path: Path) -> None:
    run_until(plan(*TINY, ONE), tmp_path, "merge", 2)
    with pytest.raises(UserError, match="holds a run already .*resume=auto"):
        run(plan(*TINY, ONE, "resume=null"), tmp_path)
