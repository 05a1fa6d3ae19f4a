"""A search by Optuna: its space, its trials, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from fedspa.cli import main
from fedspa.core.errors import UserError
from fedspa.studies import search
from fedspa.studies.search import Search, Space, validation_score
from fedspa.tracking.sweep_run import Parent

LR = "training.lr=tag(log,interval(0.01,1))"


def space(*words: str, **params: str) -> Space:
    return Space.of(params, words, OverridesParser.create())


def test_a_space_is_what_varies():
    found = space(LR, "mask=dst,rsm", "training.epochs=range(1,6)", "seed=3", "hardware=cpu")
    assert list(found.varied) == ["training.lr", "mask", "training.epochs"]
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

    def __call__(self, study, parent) -> int:
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
    (folder / "rounds.csv").write_text(f"round,val_accuracy/personal\n1,99\n2,{score!r}\n3,\n")
    (folder / "config.yaml").write_text("eval: {final_rounds: 1}\n")
    (folder / "summary.json").write_text("{}")


def searched(root: Path, plan, runs: Runs, trials: int = 12, at_once: int = 1, seed: int = 0) -> int:
    made = plan("logger=none", "dataset.val_fraction=0.2")
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

    def batch(study, parent) -> int:
        sizes.append(len(study.jobs))
        return runs(study, parent)

    searched(tmp_path, plan, batch, trials=5, at_once=2)
    assert sizes == [2, 2, 1]


def test_a_kill_while_a_batch_is_drawn_changes_no_draw(plan, tmp_path, monkeypatch):
    """Two of four trials are in the journal; the batch is drawn to its end, and runs as the one it would have been."""
    import optuna

    whole, killed, after = Runs(tmp_path / "a"), Runs(tmp_path / "b"), Runs(tmp_path / "b")
    searched(tmp_path / "a", plan, whole, trials=16, at_once=4)
    add, added = optuna.Study.add_trial, []

    def add_or_die(study, trial) -> None:
        if trial.state == optuna.trial.TrialState.RUNNING:
            if len(added) == 14:
                raise KeyboardInterrupt
            added.append(trial)
        add(study, trial)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, "add_trial", add_or_die)
        with pytest.raises(KeyboardInterrupt):
            searched(tmp_path / "b", plan, killed, trials=16, at_once=4)
    searched(tmp_path / "b", plan, after, trials=16, at_once=4)
    assert (len(killed.names), len(after.names)) == (12, 4)
    assert killed.names + after.names == whole.names


def test_a_search_is_one_run_in_mlflow(plan, tmp_path, monkeypatch):
    """It tells of all batches, of earlier starts too, and of a failure in any of them."""
    opened = []

    @contextmanager
    def nested_in(sweep, loggers):
        opened.append(Parent())
        yield opened[-1]

    monkeypatch.setattr(search, "nested_in", nested_in)
    runs = Runs(tmp_path)

    def run_jobs(study, parent) -> int:
        if parent.failed == len(opened) - 1 == 0 and not runs.names:
            runs.names.append("fails")
            parent.failed += 1
            parent.outcomes |= {job.name: "killed" for job in study.jobs}
            return 1
        return runs(study, parent)

    assert searched(tmp_path, plan, run_jobs, trials=3) == 1
    assert searched(tmp_path, plan, run_jobs, trials=5) == 0
    first, second = opened
    assert (first.failed, second.failed) == (1, 1)
    assert [words.endswith("% on validation rows") for words in first.outcomes.values()] == [
        False,
        True,
        True,
    ]
    assert list(second.outcomes.values())[0] == "failed"
    assert list(second.outcomes)[:3] == list(first.outcomes) and len(second.outcomes) == 5


def test_trials_drawn_together_may_be_the_same_job(plan, tmp_path, capsys):
    made, batches = plan("logger=none", "dataset.val_fraction=0.2"), []

    def run_jobs(study, parent) -> int:
        batches.append([job.name for job in study.jobs])
        for name in batches[-1]:
            leave(tmp_path / study.name / name, {"mask=dst": 50.0, "mask=rsm": 60.0}[name])
        return 0

    asked = space("mask=dst,rsm")
    assert Search(8, 4, 0, None).run(asked, tmp_path, lambda overrides: made, run_jobs) == 0
    assert len(batches) == 2
    for batch in batches:  # four trials of two choices
        assert len(batch) == len(set(batch)) <= 2
    assert "Best of 8 trials: personal accuracy 60.00 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "options", "overrides", "runs"),
    [
        (["mask=dst,rsm"], {"kind": "global"}, [], 2),
        (["mask=dst,rsm"], {"seed": 1}, [], 2),
        (["mask=dst,rsm,none"], {}, [], 2),
        (["mask=dst,rsm"], {}, ["training.epochs=1"], 2),
        (["mask=rsm,dst"], {}, ["hardware.workers=1"], 0),  # the same question
    ],
)
def test_trials_of_another_question_are_not_mixed(words, options, overrides, runs, plan, tmp_path):
    def ask(words, options, overrides) -> int:
        begun = []

        def run_jobs(study, parent) -> int:
            begun.append(1)
            for job in study.jobs:
                leave(tmp_path / study.name / job.name, 50.0)
            return 0

        made = plan("logger=none", "dataset.val_fraction=0.2", *overrides)
        options = {"trials": 2, "at_once": 1, "seed": 0, "kind": None} | options
        Search(**options).run(space(*words), tmp_path, lambda overrides: made, run_jobs)
        return len(begun)

    assert ask(["mask=dst,rsm"], {}, []) == 2
    assert ask(words, options, overrides) == runs


def test_two_files_of_sweeps_are_two_searches():
    assert space("sweep=first", LR).name != space("sweep=second", LR).name


def test_a_failed_trial_has_no_score(plan, tmp_path, capsys):
    assert searched(tmp_path, plan, lambda study, parent: 1, trials=2) == 1
    assert "Best" not in capsys.readouterr().out
    assert validation_score(tmp_path, "personal") is None


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
    assert "cannot tell its jobs before they run" in capsys.readouterr().err
    for option, sentence in (
        ("trials=0", "trials=0 is out of range: it must be at least 1"),
        ("seed=x", "seed=x is not a whole number"),
    ):
        assert command(finish, "dataset.val_fraction=0.2", f"hydra.sweeper.{option}") == 2
        assert capsys.readouterr().err == f"Error: hydra.sweeper.{sentence}.\n"
    assert command(finish, "dataset.val_fraction=0.2") == 0
    assert "Best of 2 trials: personal accuracy 50.00 % on validation rows" in capsys.readouterr().out
