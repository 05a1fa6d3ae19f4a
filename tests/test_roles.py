"""The one table of roles, and that hash, resume, sweeps and reports follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from omegaconf import OmegaConf
from report_runs import make_run

from fedspa.config.plan import Plan
from fedspa.core.identity import what_differs
from fedspa.core.paths import config_dir
from fedspa.core.roles import ROLES, Role, flat, role_of
from fedspa.core.settings import Config
from fedspa.report.runs import folders_under, read_runs
from fedspa.report.study import Study, make_study
from fedspa.report.tables import all_tables
from fedspa.runs.experiment import run
from fedspa.studies.jobs import Job, is_neutral
from fedspa.studies.sweep import PlannedJob, finished
from fedspa.training.hardware import Hardware


def typed(settings: type, prefix: str = "") -> Iterator[str]:
    """The settings of a dataclass by dotted name, those of its sections included."""
    hints = get_type_hints(settings)
    for field in fields(settings):
        if is_dataclass(hints[field.name]):
            yield from typed(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


# The table is whole


@pytest.mark.parametrize("key", [*typed(Config), *typed(Hardware, "hardware.")])
def test_every_typed_setting_has_a_role(key: str) -> None:
    assert key in ROLES or key.partition(".")[0] in ROLES


@pytest.mark.parametrize(
    "group", sorted({file.parent.name for file in config_dir().glob("*/*.yaml")} | {"sweep"})
)
def test_every_group_has_a_role(group: str) -> None:
    assert group in ROLES


def test_every_setting_of_a_composed_config_has_a_role(plan: Callable[..., Plan]) -> None:
    for words in ([], ["method=ditto"], ["dataset=synthetic_clients", "logger=[mlflow,tensorboard]"]):
        for key in flat(plan(*words).resolved):
            assert key in ROLES or key.partition(".")[0] in ROLES, key


def test_a_group_speaks_for_its_options_and_a_stranger_is_taken_to_decide_the_weights() -> None:
    assert role_of("method.proximal") is role_of("mask.of_a_plug_in.depth") is Role.TRAINS
    assert role_of("loggers.mlflow.tracking_uri") is role_of("engine.clients") is Role.NEITHER
    assert role_of("metrics.macro_f1.name") is Role.TESTS
    assert role_of("hardware.precision") is Role.TRAINS and role_of("hardware") is Role.NEITHER
    assert role_of("of_another_version.depth") is Role.TRAINS


# What follows from it

CHANGES = {
    "training.lr=0.2": Role.TRAINS,
    "sparsity=0.4": Role.TRAINS,
    "mask.alpha0=0.4": Role.TRAINS,
    "hardware.precision=bf16-mixed": Role.TRAINS,
    "seed=1": Role.TESTS,
    "finetune.epochs=1": Role.TESTS,
    "eval.final_rounds=2": Role.TESTS,
    "eval.clients=3": Role.TESTS,
    "metric=[accuracy,macro_f1]": Role.TESTS,
    "save.local=true": Role.KEEPS,
    "theory.every=1": Role.KEEPS,
    "eval.targets=[50]": Role.KEEPS,
    "trusted_packages=[json]": Role.NEITHER,
    "resume=auto": Role.NEITHER,
    "checkpoint.every=3": Role.NEITHER,
    "hardware.threads=2": Role.NEITHER,
    "engine=compiled": Role.NEITHER,
    "logger=none": Role.NEITHER,
    "name=other": Role.NEITHER,
}


@pytest.mark.parametrize(("word", "role"), CHANGES.items())
def test_hash_resume_and_sweep_follow_the_table(plan: Callable[..., Plan], word: str, role: Role) -> None:
    one, other = plan("name=one"), plan("name=one", word)
    assert (one.config_hash != other.config_hash) is (role in (Role.TRAINS, Role.TESTS))
    assert bool(what_differs(one.resolved, other.resolved)) is (role is not Role.NEITHER)
    assert is_neutral(word.partition("=")[0]) is (role is Role.NEITHER)


def study_of(root: Path) -> Study:
    return make_study("study", read_runs(folders_under(root)))


@pytest.mark.parametrize(
    "other",
    [
        {"resume": "auto"},
        {"checkpoint": {"every": 5, "keep": 2}},
        {"trusted_packages": ["mine"]},
        {"save": {"local": True}},
        {"eval": {"targets": [50.0]}},
        {"hardware": {"workers": 2}},
    ],
    ids=str,
)
def test_runs_that_differ_in_no_result_are_one_row(tmp_path: Path, other: dict[str, Any]) -> None:
    usual = {
        "resume": None,
        "checkpoint": {"every": None, "keep": 2},
        "trusted_packages": [],
        "save": {"local": False},
        "hardware": {"workers": 1},
    }
    make_run(tmp_path / "a", {"global": [50.8]}, seed=0, **usual)
    make_run(tmp_path / "b", {"global": [37.6]}, seed=1, **usual | other)
    study = study_of(tmp_path)
    [row], [setting] = study.rows, study.settings
    assert row.label == "FedSpa (DST)"
    assert [run.summary["final/accuracy/global"] for run in setting.runs_of(row)] == [50.8, 37.6]


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("finetune.epochs", (1, 5)),
        ("eval.final_rounds", (1, 3)),
        ("eval.clients", (2, None)),
        ("eval.every", (1, 5)),
        ("costs.convention", ("honest", "paper")),
    ],
)
def test_runs_that_are_tested_otherwise_are_never_averaged(
    tmp_path: Path, setting: str, values: tuple[Any, Any]
) -> None:
    for seed, value in enumerate(values):
        file = make_run(tmp_path / str(seed), {"global": [50]}, seed=seed) / "config.yaml"
        config = OmegaConf.load(file)
        OmegaConf.update(config, setting, value)
        OmegaConf.save(config, file)
    study = study_of(tmp_path)
    texts = sorted("null" if value is None else str(value) for value in values)
    assert sorted(row.label for row in study.rows) == [f"FedSpa (DST) {setting}={text}" for text in texts]
    assert all(len(study.settings[0].runs_of(row)) == 1 for row in study.rows)


def test_two_seeds_are_one_row_though_the_second_was_started_with_resume(
    plan: Callable[..., Plan], tmp_path: Path
) -> None:
    small = ("dataset.train_rows=200", "federation.rounds=1", "federation.clients_per_round=2")
    small = (*small, "federation.clients=4", "logger=none", "hardware.workers=1", "training.epochs=1")
    run(plan(*small), tmp_path / "a")
    for words, done in (["resume=auto"], True), (["save.local=true"], False), (["eval.targets=[1]"], False):
        job = PlannedJob(Job(("a",), ()), tmp_path / "a", plan(*small, *words))
        assert job.finished and (finished([job]) == [job]) is done
    run(plan(*small, "seed=1", "resume=auto", "checkpoint.every=1", "name=again"), tmp_path / "b")
    study = study_of(tmp_path)
    [row], [setting] = study.rows, study.settings
    assert [run.seed for run in setting.runs_of(row)] == [0, 1]
    [[first, *_]] = all_tables(study)[0].lines.values()
    assert row.label == "FedSpa (DST)" and "seed]" not in first.text and "±" in first.text
