"""A search by Optuna: its space, its trials, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from fedspa.cli import main
from fedspa.core.components import build
from fedspa.core.errors import UserError
from fedspa.metrics.mse import MeanSquaredError
from fedspa.studies import search
from fedspa.studies.jobs import Study
from fedspa.studies.launchers import JobFailed
from fedspa.studies.search import Search, Space, validation_score
from fedspa.studies.sweep import PlannedJob
from fedspa.tracking.sweep_run import Parent

LR = "training.lr=tag(log,interval(0.01,1))"


def space(*words: str, **params: str) -> Space:
    return Space.of(params, words, OverridesParser.create())


def test_a_space_is_what_varies():
    found = space(LR, "mask=dst,rsm", "training.epochs=range(1,6)", "seed=3", "hardware=cpu")
    assert list(found.varied) == ["mask", "training.epochs", "training.lr"]
    assert found.fixed == ("seed=3", "hardware=cpu")
    assert found.name == "search,mask+training.epochs+training.lr,seed=3"
    other = space(LR, "hardware=cpu", "hardware.precision=64-true")  # other numbers: not the same search
    assert other.name == "search,training.lr,hardware.precision=64-true"
    mask, epochs, lr = found.distributions().values()
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


@pytest.mark.parametrize(
    "values",
    ["tag(log,interval(0,1))", "range(1,1)", "range(0,5,-1)", "range(0.0,1.0,0)", "tag(log,range(1,9,2))"],
)
def test_a_range_without_values_is_a_sentence(values):
    with pytest.raises(UserError, match=r"training.lr=.* cannot be searched: .*[^.]\.$"):
        space(f"training.lr={values}").distributions()


@pytest.mark.parametrize(
    ("values", "low", "high", "step"),
    [
        ("range(0.0,1.0,0.1)", 0.0, 0.9, 0.1),
        ("range(0,1,0.25)", 0.0, 0.75, 0.25),
        ("range(0.1,0.35,0.1)", 0.1, 0.3, 0.1),
        ("range(1.0,0.0,-0.3)", 0.1, 1.0, 0.3),
        ("range(5)", 0, 4, 1),
        ("range(2,9,3)", 2, 8, 3),
        ("range(1,8,3)", 1, 7, 3),
        ("range(1,7,3)", 1, 4, 3),
        ("range(10,0,-3)", 1, 10, 3),
    ],
)
def test_a_range_ends_before_its_stop_as_pythons(values, low, high, step):
    (found,) = space(f"sparsity={values}").distributions().values()
    assert (found.low, found.high, found.step) == (low, high, step)
    assert type(found.high) is type(high)


@pytest.mark.parametrize(
    ("values", "drawn", "expected"),
    [
        ("interval(0.1,0.9)", 0.25539072365245863, 0.2554),
        ("interval(0,1000)", 25.539072365245863, 25.54),
        ("interval(0.12341,0.6)", 0.123412, 0.12341),  # never below the lowest
        ("interval(0.5,0.5)", 0.5, 0.5),
        ("tag(log,interval(1e-5,1))", 0.0000293428244830, 0.00002934),
        ("tag(log,interval(0.01,1))", 0.293428244830, 0.2934),
        ("range(0.1,0.5,0.1)", 0.1 + 2 * 0.1, 0.3),
        ("range(1,9)", 4, 4),
        ("dst,rsm", "rsm", "rsm"),
    ],
)
def test_a_drawn_value_has_the_digits_that_matter(values, drawn, expected):
    (distribution,) = space(f"training.lr={values}").distributions().values()
    found = search._short(drawn, distribution)
    assert found == expected and type(found) is type(drawn)
    assert distribution._contains(distribution.to_internal_repr(found))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"trials": 0}, "hydra.sweeper.trials=0 is out of range"),
        ({"at_once": 0}, "hydra.sweeper.at_once=0 is out of range"),
        ({"at_once": 2.5}, "hydra.sweeper.at_once=2.5 is not a whole number"),
        ({"trials": "many"}, "hydra.sweeper.trials=many is not a whole number"),
        ({"kind": "personnal"}, "did you mean personal"),
        ({"kind": "finetuned"}, "hydra.sweeper.kind=finetuned is not known"),
    ],
)
def test_bad_options_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        build("hydra.sweeper", Search, {"trials": 1, "at_once": 1, "seed": 0, "kind": None} | options)


def test_without_optuna_a_sentence_names_the_extra(monkeypatch):
    monkeypatch.setattr(search, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs Optuna: pip install 'fedspa\[optuna\]'"):
        Search(trials=1, at_once=1, seed=0, kind=None)


class Runs:
    """Stands for `Sweeps`: a run is best, at 80 %, where the learning rate is 0.1."""

    def __init__(self, root: Path, stop_at: int | None = None, fail_at: int | None = None) -> None:
        self.root, self.stop_at, self.fail_at = root, stop_at, fail_at
        self.names: list[str] = []
        self.batches: list[int] = []

    def compose(self, words):
        return words

    def planned(self, study: Study) -> list[PlannedJob]:
        self.batches.append(len(study.jobs))
        return [PlannedJob(job, self.root / study.name / job.name, UserError()) for job in study.jobs]

    def run_missing(self, jobs, done, parent, progress) -> dict[str, JobFailed]:
        failures = {}
        for job in jobs:
            if (job.folder / "summary.json").exists():
                continue
            self.names.append(job.name)
            if len(self.names) == self.stop_at:
                raise KeyboardInterrupt
            if len(self.names) == self.fail_at:
                parent.failed += 1
                failures[job.name] = JobFailed(1, "killed")
            else:
                leave(job.folder, self.score(job.name))
        return failures

    def score(self, name: str) -> float:
        return 80 - 10 * math.log10(float(name.split("=")[1]) / 0.1) ** 2


def leave(folder: Path, score: float) -> None:
    """What a search looks at of a finished run; the first of the two rounds is not among the final ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rounds.csv").write_text(f"round,val_accuracy/personal\n1,99\n2,{score!r}\n3,\n")
    (folder / "config.yaml").write_text("eval: {final_rounds: 1}\n")
    (folder / "summary.json").write_text("{}")


@pytest.fixture
def searched(plan, monkeypatch):
    """`searched(runs, trials=2)`: the exit code of a search by these runs."""
    made = plan("logger=none", "dataset.val_fraction=0.2")
    monkeypatch.setattr(search, "check", lambda words: made)

    def searched(runs: Runs, *words: str, **options) -> int:
        options = {"trials": 12, "at_once": 1, "seed": 0, "kind": None} | options
        return Search(**options).run(space(*(words or [LR])), runs)

    return searched


def test_a_search_finds_the_best_and_prints_its_command(searched, tmp_path, capsys):
    runs = Runs(tmp_path)
    assert searched(runs) == 0
    assert len(runs.names) == len(set(runs.names)) == 12
    rates = [float(name.split("=")[1]) for name in runs.names]
    best = min(rates, key=lambda rate: abs(math.log10(rate / 0.1)))
    told = capsys.readouterr().out
    assert f"in trial {rates.index(best) + 1}:\n  python src/train.py training.lr={best}\n" in told
    score = runs.score(f"training.lr={best}")
    assert f"Best of 12 trials: personal accuracy {score:.2f} % on validation rows" in told


def test_a_search_that_was_broken_off_goes_on_as_if_it_had_not_been(searched, tmp_path):
    whole, first, second = Runs(tmp_path / "a"), Runs(tmp_path / "b", stop_at=5), Runs(tmp_path / "b")
    searched(whole)
    with pytest.raises(KeyboardInterrupt):
        searched(first)
    searched(second)
    assert first.names[:4] + second.names == whole.names  # the fifth trial is begun again, in the same folder
    again = Runs(tmp_path / "b")
    searched(again, trials=13)
    assert len(again.names) == 1
    other = Runs(tmp_path / "c")
    searched(other, trials=2, seed=1)
    assert not set(other.names) & set(whole.names)


def test_trials_drawn_together_run_as_one_study(searched, tmp_path):
    runs = Runs(tmp_path)
    searched(runs, trials=5, at_once=2)
    assert runs.batches == [2, 2, 1]


def test_a_search_is_one_run_in_mlflow(searched, tmp_path, monkeypatch):
    """It tells of all batches and of a failed trial, which the next start tries again."""
    opened = []

    @contextmanager
    def nested_in(sweep, loggers):
        opened.append(Parent())
        yield opened[-1]

    monkeypatch.setattr(search, "nested_in", nested_in)
    assert searched(Runs(tmp_path, fail_at=1), trials=3) == 1
    again = Runs(tmp_path)
    assert searched(again, trials=5) == 0
    first, second = opened
    assert (first.failed, second.failed) == (1, 0)
    outcomes = list(first.outcomes.values())
    assert outcomes[0] == "failed" and all(words.endswith("% on validation rows") for words in outcomes[1:])
    assert again.names[0] == list(first.outcomes)[0] and len(second.outcomes) == 5


def test_trials_drawn_together_may_be_the_same_job(searched, tmp_path, capsys):
    runs = Runs(tmp_path)
    runs.score = {"mask=dst": 50.0, "mask=rsm": 60.0}.__getitem__
    assert searched(runs, "mask=dst,rsm", trials=8, at_once=4) == 0
    assert len(runs.batches) == 2 and max(runs.batches) <= 2  # four trials of two choices
    assert sorted(runs.names) == ["mask=dst", "mask=rsm"]
    assert "Best of 8 trials: personal accuracy 60.00 %" in capsys.readouterr().out


def test_two_files_of_sweeps_are_two_searches():
    assert space("sweep=first", LR).name != space("sweep=second", LR).name


def test_failed_trials_have_no_score(searched, tmp_path, capsys):
    assert searched(Runs(tmp_path, fail_at=1), trials=1) == 1
    assert "Best" not in capsys.readouterr().out
    assert validation_score(tmp_path, "personal") == (None, "failed")


def test_an_error_is_searched_for_its_least(plan, tmp_path, monkeypatch, capsys):
    made = plan("logger=none", "dataset.val_fraction=0.2")
    made = replace(made, metrics={"mse": MeanSquaredError(name="mse")})
    monkeypatch.setattr(search, "check", lambda words: made)

    class Errors(Runs):
        def run_missing(self, jobs, done, parent, progress):
            failures = super().run_missing(jobs, done, parent, progress)
            for job in jobs:
                rows = (job.folder / "rounds.csv").read_text().replace("accuracy", "mse")
                (job.folder / "rounds.csv").write_text(rows)
                facts = {"metrics": ["mse"], "lower_is_better": ["mse"], "in_percent": False}
                (job.folder / "summary.json").write_text(json.dumps(facts))
            return failures

        def score(self, name: str) -> float:
            return 0.123456 + math.log10(float(name.split("=")[1]) / 0.1) ** 2

    runs = Errors(tmp_path)
    assert Search(12, 1, 0, None).run(space(LR), runs) == 0
    least = min(map(runs.score, runs.names))
    assert f"Best of 12 trials: personal mse {least:.4g} on validation rows" in capsys.readouterr().out


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """`typed(task, "seed=1")`: the exit code of `train.py` with these words, in this process."""

    def typed(task, *words: str) -> int:
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # which `main` sets
        place = f"hydra.sweep.dir={tmp_path}" if "-m" in words else f"hydra.run.dir={tmp_path}/run"
        monkeypatch.setattr(sys, "argv", ["train.py", *words, "logger=none", place])
        return main(task)

    return typed


def finish(plan, folder):
    leave(folder, 50.0)
    (folder / "summary.json").write_text(json.dumps({"config_hash": plan.config_hash}))


def test_the_shipped_search_and_the_command_that_it_ends_with(typed, capsys):
    file = Path(__file__).parents[1] / "sweeps" / "tune.yaml"
    (words,) = re.findall("^# python src/train.py (.*)$", file.read_text(), re.MULTILINE)
    small = ["experiment=digits_study", "seed=3"]
    assert typed(finish, *words.split(), *small, "hydra.sweeper.trials=2") == 0
    command = capsys.readouterr().out.splitlines()[-1]
    found = []
    assert typed(lambda plan, folder: found.append(plan), *shlex.split(command)[2:]) == 0
    (best,) = found
    assert (best.settings.seed, best.dataset.val_fraction, best.names["dataset"]) == (3, 0.2, "digits")
    assert f"mask.alpha0={best.mask.alpha0} " in command
    assert f"training.lr={best.settings.training.lr}" in command


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sweep=tune"], "hydra.sweeper.trials belongs to a search: add hydra/sweeper=search."),
        (
            ["hydra/sweeper=search", "sweep=main"],
            "hydra.sweeper.rows has no place in a search: leave out hydra/sweeper=search.",
        ),
    ],
)
def test_a_search_is_no_study_nor_a_study_a_search(words, sentence, typed, capsys):
    assert typed(finish, "-m", *words) == 2
    assert capsys.readouterr().err == f"Error: {sentence}\n"


def test_only_validation_rows_choose(typed, capsys):
    def command(task, *words: str) -> int:
        return typed(task, "-m", "hydra/sweeper=search", "hydra.sweeper.trials=2", LR, *words)

    assert command(finish) == 2
    assert capsys.readouterr().err == (
        "Error: hydra/sweeper=search chooses by validation rows, and there are none: set dataset.val_fraction=0.2.\n"
    )
    assert command(finish, "dataset.val_fraction=0.2", "method=fedavg", "hydra.sweeper.kind=personal") == 2
    assert "hydra.sweeper.kind=personal is not known: valid are global, local" in capsys.readouterr().err
    assert command(finish, "dataset.val_fraction=0.2", "dry_run=true") == 2
    assert "draws its jobs while it runs" in capsys.readouterr().err
    for option, sentence in (
        ("trials=0", "trials=0 is out of range: it must be at least 1"),
        ("seed=x", "seed=x is not a whole number"),
    ):
        assert command(finish, "dataset.val_fraction=0.2", f"hydra.sweeper.{option}") == 2
        assert capsys.readouterr().err == f"Error: hydra.sweeper.{sentence}.\n"
    assert command(finish, "dataset.val_fraction=0.2") == 0
    assert "Best of 2 trials: personal accuracy 50.00 % on validation rows" in capsys.readouterr().out
