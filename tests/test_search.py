"""A search by Optuna: its space, its trials, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from fedspa.cli import main
from fedspa.errors import UserError
from fedspa.sweeping import search
from fedspa.sweeping.search import Search, Space, validation_score

LR = "training.lr=tag(log,interval(0.01,1))"


def space(*words: str, **params: str) -> Space:
    return Space.of(params, words, OverridesParser.create())


def test_a_space_is_what_varies():
    found = space(LR, "mask=dst,rsm", "training.epochs=range(1,6)", "seed=3", "hardware=cpu")
    assert list(found.varied) == ["training.lr", "mask", "training.epochs"]
    assert found.fixed == ("seed=3", "hardware=cpu")
    assert found.name == "search,mask+training.epochs+training.lr,seed=3"
    lr, mask, epochs = found.distributions().values()
    assert (lr.low, lr.high, lr.log) == (0.01, 1.0, True)
    assert mask.choices == ("dst", "rsm")
    assert (epochs.low, epochs.high, epochs.step, epochs.log) == (1, 5, 1, False)  # as Python's range
    job = found.job({"training.lr": 0.5, "mask": "rsm", "training.epochs": 2})
    assert job.name == "mask=rsm,training.epochs=2,training.lr=0.5"
    assert job.overrides == ("seed=3", "hardware=cpu", *job.name.split(","))


def test_the_command_line_wins_over_the_space_of_a_file():
    assert space("a=1", a="1,2", b="interval(0,1)").fixed == ("a=1",)
    with pytest.raises(UserError, match="has nothing to vary"):
        space("a=1", a="1,2")


def test_a_range_without_values_is_a_sentence():
    with pytest.raises(UserError, match=r"training.lr=tag\(log,interval\(0,1\)\) cannot be searched"):
        space("training.lr=tag(log,interval(0,1))").distributions()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"trials": 0}, "hydra.sweeper.trials=0 is out of range"),
        ({"at_once": 0}, "hydra.sweeper.at_once=0 is out of range"),
        ({"kind": "personnal"}, "did you mean personal"),
    ],
)
def test_bad_options_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        Search(**{"trials": 1, "at_once": 1, "seed": 0, "kind": None} | options)


def test_without_optuna_a_sentence_names_the_extra(monkeypatch):
    monkeypatch.setattr(search, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs Optuna: pip install 'fedspa\[optuna\]'"):
        Search(trials=1, at_once=1, seed=0, kind=None)


class Runs:
    """Stands for the sweep: a run is best, at 80 %, where the learning rate is 0.1."""

    def __init__(self, root: Path, stop_at: int | None = None) -> None:
        self.root, self.stop_at = root, stop_at
        self.names: list[str] = []

    def __call__(self, study) -> int:
        for job in study.jobs:
            self.names.append(job.name)
            if len(self.names) == self.stop_at:
                raise KeyboardInterrupt
            leave(
                self.root / study.name / job.name,
                80 - 10 * math.log10(float(job.name.split("=")[1]) / 0.1) ** 2,
            )
        return 0


def leave(folder: Path, score: float) -> None:
    """What a search looks at of a finished run; the first of the two rounds is not among the final ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rounds.csv").write_text(f"round,personal_val_accuracy_mean\n1,99\n2,{score!r}\n3,\n")
    (folder / "config.yaml").write_text("eval: {final_rounds: 1}\n")
    (folder / "summary.json").write_text("{}")


def searched(root: Path, plan, runs: Runs, trials: int = 12, at_once: int = 1, seed: int = 0) -> int:
    made = plan("dataset.val_fraction=0.2")
    return Search(trials, at_once, seed, None).run(space(LR), root, lambda overrides: made, runs)


def test_a_search_finds_the_best_and_prints_its_command(plan, tmp_path, capsys):
    runs = Runs(tmp_path)
    assert searched(tmp_path, plan, runs) == 0
    assert len(runs.names) == len(set(runs.names)) == 12
    rates = [float(name.split("=")[1]) for name in runs.names]
    best = min(rates, key=lambda rate: abs(math.log10(rate / 0.1)))
    told = capsys.readouterr().out
    assert f"in trial {rates.index(best) + 1}:\n  python src/train.py training.lr={best}\n" in told
    assert (
        "Best of 12 trials: personal accuracy 7" in told or "Best of 12 trials: personal accuracy 80" in told
    )


def test_a_search_that_was_broken_off_goes_on_as_if_it_had_not_been(plan, tmp_path):
    whole, first, second = Runs(tmp_path / "a"), Runs(tmp_path / "b", stop_at=5), Runs(tmp_path / "b")
    searched(tmp_path / "a", plan, whole)
    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path / "b", plan, first)
    searched(tmp_path / "b", plan, second)
    assert first.names[:4] + second.names == whole.names  # the fifth trial is begun again, in the same folder
    again = Runs(tmp_path / "b")
    searched(tmp_path / "b", plan, again, trials=13)
    assert len(again.names) == 1
    other = Runs(tmp_path / "c")
    searched(tmp_path / "c", plan, other, trials=2, seed=1)
    assert not set(other.names) & set(whole.names)


def test_trials_drawn_together_run_as_one_study(plan, tmp_path):
    sizes = []
    runs = Runs(tmp_path)
    searched(tmp_path, plan, lambda study: sizes.append(len(study.jobs)) or runs(study), trials=5, at_once=2)
    assert sizes == [2, 2, 1]


def test_a_failed_trial_has_no_score(plan, tmp_path, capsys):
    assert searched(tmp_path, plan, lambda study: 1, trials=2) == 1
    assert "Best" not in capsys.readouterr().out
    assert validation_score(tmp_path, "personal") is None


def test_only_validation_rows_choose(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")

    def command(task, *words: str) -> int:
        own = ["-m", "hydra/sweeper=search", "hydra.sweeper.trials=2", "logger=none", LR]
        monkeypatch.setattr(sys, "argv", ["train.py", *own, f"hydra.sweep.dir={tmp_path}", *words])
        return main(task)

    def task(plan, folder):
        leave(folder, 50.0)
        (folder / "summary.json").write_text(json.dumps({"config_hash": plan.config_hash}))

    assert command(task) == 2
    assert capsys.readouterr().err == (
        "Error: hydra/sweeper=search chooses by validation rows, and there are none: set dataset.val_fraction=0.2.\n"
    )
    assert command(task, "dataset.val_fraction=0.2", "method=fedavg", "hydra.sweeper.kind=personal") == 2
    assert (
        "hydra.sweeper.kind=personal is no model of method=fedavg: it must be one of"
        in capsys.readouterr().err
    )
    assert command(task, "dataset.val_fraction=0.2", "dry_run=true") == 2
    assert "cannot tell its jobs before they run" in capsys.readouterr().err
    assert command(task, "dataset.val_fraction=0.2") == 0
    assert "Best of 2 trials: personal accuracy 50.00 % on validation rows" in capsys.readouterr().out
