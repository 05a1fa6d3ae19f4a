"""A finished run that is continued with more rounds, on purpose and in a folder of its own."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kill_points import run_until
from test_malformed import contents, one_sentence
from test_resume import ONE, TINY, files, rows

from fedspa.checkpoints.archive import read, write
from fedspa.checkpoints.checkpoint import checkpoint_files
from fedspa.checkpoints.resuming import place
from fedspa.config.plan import Plan
from fedspa.core.errors import UserError
from fedspa.core.tracker import Continued
from fedspa.runs.experiment import run

Planned = Callable[..., Plan]
BASE = (*TINY, ONE, "federation.rounds=2", "eval.final_rounds=2", "checkpoint.every=1")
SHORT = (*BASE, "mask.anneal_rounds=4")
RUNS = {
    "fedspa": SHORT,
    "ditto": (*BASE, "method=ditto", "mask=none", "training.epochs=5"),
    "with all that is kept": (*SHORT, "save.local=true", "theory.every=1", "dataset.val_fraction=0.3"),
}


def more(plan: Planned, folder: Path, *words: str) -> Plan:
    """The run of four rounds that continues the one of two in `folder`."""
    return plan(*SHORT, "federation.rounds=4", f"resume={folder}", *words)


def continued(folder: Path) -> Any:
    summary = json.loads((folder / "summary.json").read_text())
    return {key: summary[f"continued/{key}"] for key in Continued._fields}


@pytest.mark.parametrize("name", RUNS)
def test_the_results_are_those_of_one_long_run(
    plan: Planned, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    short, long, whole = (tmp_path / name for name in ("short", "long", "whole"))
    run(plan(*RUNS[name]), short)
    before = contents(short)
    longer = plan(*RUNS[name], "federation.rounds=4", f"resume={short}")
    assert place(longer, long, given=False) == (long, False)
    run(longer, long)
    assert contents(short) == before
    assert continued(short) == dict.fromkeys(Continued._fields)
    assert continued(long) == {"folder": str(short), "round": 2, "following": []}
    assert f"Continues {short} after round 2." in caplog.messages
    run(plan(*RUNS[name], "federation.rounds=4"), whole)
    left, expected = files(long), files(whole)
    for found in (left, expected):
        del found["config.yaml"]
        for key in Continued._fields:
            del found["summary"][f"continued/{key}"]
    assert left == expected
    assert len(rows(long, "timing.csv")) == 4


@pytest.mark.parametrize("continues", [True, False])
def test_a_run_of_an_older_version_goes_on_with_the_defaults_of_new_settings(
    plan: Planned, tmp_path: Path, continues: bool
) -> None:
    """A finished run is continued; an interrupted one, which has no summary, goes on in its own folder."""
    folder = tmp_path / "old"
    run(plan(*SHORT), folder)
    (folder / "config.yaml").write_text(
        (folder / "config.yaml").read_text().replace("  val_fraction: 0.0\n", "")
    )
    for file in checkpoint_files(folder / "checkpoints"):
        state = read(file)
        del state["config"]["dataset"]["val_fraction"]
        with file.open("wb") as output:
            write(state, output)
    if continues:
        longer = more(plan, folder)
        assert place(longer, tmp_path / "new", given=False) == (tmp_path / "new", False)
        assert run(longer, tmp_path / "new")["rounds"] == 4
    else:
        (folder / "summary.json").unlink()
        again = plan(*SHORT, f"resume={folder}")
        assert place(again, folder, given=True) == (folder, False)
        assert run(again, folder)["rounds"] == 2


def test_a_schedule_that_follows_the_rounds_is_told_and_makes_another_run(
    plan: Planned, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prune rate of DST anneals over federation.rounds unless mask.anneal_rounds is given."""
    monkeypatch.setattr("fedspa.checkpoints.resuming.project_root", lambda: tmp_path)
    outputs = tmp_path / "outputs" / "day"
    run(plan(*TINY, ONE, "federation.rounds=2"), outputs / "short")
    longer = plan(*TINY, ONE, f"resume={outputs}/short")
    run(longer, outputs / "long")
    assert continued(outputs / "long")["following"] == ["mask.anneal_rounds"]
    (sentence,) = (line for line in caplog.messages if "anneal_rounds" in line)
    assert (
        "it was 2 until round 2 and is 4 from there on, so the weights are not those of a run of 4"
        in sentence
    )
    run(plan(*TINY, ONE), tmp_path / "whole")
    assert files(outputs / "long")["weights.safetensors"] != files(tmp_path / "whole")["weights.safetensors"]
    straight = plan(*TINY, ONE)
    assert straight.config_hash == longer.config_hash
    assert place(straight, tmp_path / "new", given=False) == (tmp_path / "new", False)
    assert place(longer, outputs / "long", given=True) == (outputs / "long", True)


def test_a_continued_run_that_is_killed_goes_on_in_its_own_folder(plan: Planned, tmp_path: Path) -> None:
    run(plan(*SHORT), tmp_path / "short")
    longer = more(plan, tmp_path / "short")
    run(longer, tmp_path / "whole")
    for point, number in (
        ("sync", 1),
        ("bytes", 1),
        ("rename", 3),
        ("merge", 1),
        ("table", 2),
        ("results", 1),
    ):
        folder = tmp_path / point
        assert run_until(longer, folder, point, number) == -signal.SIGKILL
        # The same command again, or the new folder by its name.
        again = longer if number == 1 else more(plan, folder)
        assert place(again, folder, given=True) == (folder, False)
        run(longer, folder)
        assert files(folder) == files(tmp_path / "whole"), point


def test_what_does_not_fit_is_refused(plan: Planned, tmp_path: Path) -> None:
    short, new = tmp_path / "short", tmp_path / "new"
    run(plan(*SHORT, "eval.final_rounds=1"), short)
    for words, reason in {
        "federation.rounds=1": "federation.rounds=1 is less than the 2 rounds of the finished run in",
        "federation.rounds=3 seed=1": r"other settings: seed \(0 there, 1 here\)",
        "federation.rounds=9 training.lr=0.5": r"other settings: training.lr \(.* there, 0.5 here\)",
        "federation.rounds=9 mask.anneal_rounds=9": r"mask.anneal_rounds \(4 there, 9 here\)",
    }.items():
        with pytest.raises(UserError, match=reason) as refused:
            place(plan(*SHORT, "eval.final_rounds=1", f"resume={short}", *words.split()), new, given=False)
        one_sentence(refused.value)
    longer = more(plan, short, "eval.final_rounds=1")
    with pytest.raises(UserError, match=r"other settings: federation.rounds \(2 there, 4 here\)"):
        place(longer, short, given=True)
    last = short / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"last.ckpt cannot be read \(damaged, cut short, or"):
        run(longer, new)
    assert not (new / "config.yaml").exists()
    last.unlink()
    with pytest.raises(UserError, match=r"cannot be continued, for it has no checkpoints/last.ckpt"):
        place(longer, new, given=False)
