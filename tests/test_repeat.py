"""A run that is repeated from the config in its folder."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from test_resume import ONE, TINY

from fedspa.cli import main
from fedspa.config import schema
from fedspa.config.plan import Plan
from fedspa.config.recorded import recorded_plan
from train import train

Command = Callable[..., int]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run that differs from conf/ in settings and groups, and was a job of a sweep."""
    folder = tmp_path_factory.mktemp("run") / "first"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYDRA_FULL_ERROR", "0")
        patch.setattr(logging.getLogger(), "handlers", [])
        words = [*TINY, ONE, "seed=3", "sparsity=0.7", "mask=rsm", "logger=csv", f"hydra.run.dir={folder}"]
        patch.setattr(sys, "argv", ["train.py", *words])
        assert main(train) == 0
    return folder


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """`command(task, "seed=4")`: the exit code of that command line, run in this process."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    def command(task: Callable[[Plan, Path], None], *words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        return main(task)

    return command


def files(folder: Path) -> dict[str, bytes]:
    """What is the same in equal runs."""
    patterns = ("*.safetensors", "rounds.csv", "clients.csv", "partition.json", "config.yaml")
    return {file.name: file.read_bytes() for pattern in patterns for file in folder.glob(pattern)}


def test_a_repeated_run_leaves_the_same_bytes(run: Path, command: Command, tmp_path: Path) -> None:
    again = tmp_path / "again"
    words = ("--config-dir", str(run), "--config-name", "config")
    assert command(train, *words, f"hydra.run.dir={again}") == 0
    before, after = files(run), files(again)
    assert len(before) == 6 and before.keys() == after.keys()
    recorded = before.pop("config.yaml").replace(b"resume: auto", b"resume: null")
    assert (after.pop("config.yaml"), after) == (recorded, before)


@pytest.mark.parametrize("option", ["--config-dir={}", "-cd={}", "--config-path={}"])
def test_each_way_to_name_the_folder_repeats_the_run_in_the_projects_outputs(
    run: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(schema, "project_root", lambda: tmp_path)
    seen: list[tuple[Plan, Path]] = []
    assert command(lambda plan, folder: seen.append((plan, folder)), option.format(run)) == 0
    (plan, folder), recorded = seen[0], recorded_plan(run / "config.yaml")
    assert plan.config_hash == recorded.config_hash and plan.settings.name == recorded.settings.name
    assert folder.is_relative_to(tmp_path / "outputs") and folder.name.endswith(plan.settings.name)


def test_settings_and_groups_may_change_and_the_name_follows(run: Path, command: Command) -> None:
    seen: list[Plan] = []

    def task(plan: Plan, folder: Path) -> None:
        seen.append(plan)

    where = f"--config-dir={run}"
    assert command(task, where, "seed=8", "training.lr=0.5") == 0
    assert command(task, where, "mask=dst", "logger=none") == 0
    assert [plan.settings.name for plan in seen] == [
        "fedspa-rsm-s0.7-synthetic-seed8",
        "fedspa-dst-s0.7-synthetic-seed3",
    ]
    assert (seen[0].settings.training.lr, seen[0].settings.federation.clients) == (0.5, 5)
    assert not seen[1].loggers and "alpha0" in seen[1].resolved["mask"]


@pytest.mark.parametrize(
    ("name", "repeated"), [("mine", "mine"), ("mine-seed3", "mine-seed8"), ("try13", "try13")]
)
def test_a_name_of_the_users_own_stays_but_for_its_seed(
    run: Path, command: Command, tmp_path: Path, name: str, repeated: str
) -> None:
    rewrite(run, tmp_path, name=name, **{"loggers.pictures.parent_run_id": "old"})
    seen: list[Plan] = []
    assert command(lambda plan, folder: seen.append(plan), f"--config-dir={tmp_path}", "seed=8") == 0
    assert seen[0].settings.name == repeated and seen[0].settings.resume is None


def rewrite(run: Path, folder: Path, **changes: object) -> None:
    """Another folder with the run's config, changed."""
    head, _, text = (run / "config.yaml").read_text().partition("\n")
    changed = OmegaConf.create(text)
    for key, value in changes.items():
        OmegaConf.update(changed, key, value)
    (folder / "config.yaml").write_text(f"{head}\n{OmegaConf.to_yaml(changed)}")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("-m", "seed=0,1"), "-m cannot repeat the run"),
        (("method=fedavg",), "choose it too, as in mask=<a file of conf/mask>"),
        (("mask.nope=1",), "mask.nope is not a setting"),
    ],
)
def test_what_cannot_be_repeated_is_a_sentence(
    run: Path, command: Command, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert command(lambda plan, folder: None, f"--config-dir={run}", *words) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


@pytest.mark.parametrize("key", ["nope", "mask.nope", "training.nope"])
def test_a_config_of_another_version_is_told_as_such(
    run: Path, command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path, key: str
) -> None:
    rewrite(run, tmp_path, **{key: 1})
    (tmp_path / "summary.json").write_text(json.dumps({"version": "9.8.7"}))
    assert command(lambda plan, folder: None, f"--config-dir={tmp_path}") == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/config.yaml, which fedspa 9.8.7 wrote" in error and f"{key} is not a setting" in error


def test_a_main_config_that_would_be_passed_over_is_refused(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("seed: 5\n")
    where = f"--config-dir={tmp_path}"
    assert command(lambda plan, folder: None, where, "--config-name=config") == 2
    assert f"--config-name=config is the name of a file of conf/ too, which wins over {tmp_path}" in (
        capsys.readouterr().err
    )
    assert command(lambda plan, folder: None, where, "logger=none") == 0  # a folder of more groups


@pytest.mark.parametrize("words", [(), ("--config-name", "config")], ids=str)
@pytest.mark.parametrize("folder", ["empty", "not_there"])
def test_a_folder_that_would_change_nothing_is_refused(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "empty").mkdir()
    where = f"--config-dir={tmp_path / folder}"
    assert command(lambda plan, folder: None, where, *words, "seed=1") == 2
    assert capsys.readouterr().err.startswith(f"Error: {where} ")
