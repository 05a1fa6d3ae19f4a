"""Folders of runs: names that any file system takes, and one for each run."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import hydra.core.utils
import pytest

from fedspa.cli import main
from fedspa.config import schema
from fedspa.core.file_names import LONGEST_NAME, file_name
from fedspa.runs.folders import new_folder


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("digits-fedspa-dst-s0.5-seed0", "digits-fedspa-dst-s0.5-seed0"),
        ("a:b*?<x>|y", "a%3Ab%2A%3F%3Cx%3E%7Cy"),
        ("org/name", "org%2Fname"),
        ("50%", "50%25"),
        ('it\'s "q"\\', "it%27s %22q%22%5C"),
        ("模型 ä", "模型 ä"),
        ("tab\tend", "tab%09end"),
        ("ends with a dot.", "ends with a dot%2E"),
        ("..", ".%2E"),
        ("M\udcfcller", "M%ED%B3%BCller"),
    ],
)
def test_a_name_keeps_what_every_file_system_takes(text: str, name: str) -> None:
    assert file_name([text]) == name


@pytest.mark.parametrize("letter", ["x", "模", ":"])
def test_long_names_are_cut_and_stay_apart(letter: str) -> None:
    first, second = (file_name([300 * letter + end]) for end in "ab")
    assert first != second
    assert max(len(first.encode()), len(second.encode())) <= LONGEST_NAME + 9


def test_a_long_name_loses_whole_parts() -> None:
    name = file_name(["method+seed", "federation.rounds=3", "training.lr=0.1"], 32)
    assert name.startswith("method+seed,federation.rounds=3-") and len(name) == 31 + 9
    assert name != file_name(["method+seed", "federation.rounds=3", "training.lr=0.2"], 32)


def test_names_of_other_parts_are_others() -> None:
    texts = ["a:b", "a%3Ab", "a/b", "a%2Fb", "a b", "a b ", "a b%20", "a.", "a%2E"]
    assert len({file_name([text]) for text in texts}) == len(texts)


def test_processes_that_want_one_folder_get_one_each(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        folders = pool.map(new_folder, 8 * [tmp_path / "day" / "run"], chunksize=1)
    assert {folder.name for folder in folders} == {"run", *(f"run-{number}" for number in range(2, 9))}


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(schema, "project_root", lambda: tmp_path)
    clock = SimpleNamespace(now=lambda: datetime(2026, 1, 2, 3, 4, 5))
    monkeypatch.setattr(hydra.core.utils, "datetime", clock)
    folders: list[Path] = []

    def task(plan: object, folder: Path) -> None:
        (folder / "rounds.csv").touch()  # an empty folder would go away
        folders.append(folder)

    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["train.py", 'name="a:b"', "logger=none"])
        assert main(task) == 0
    day = tmp_path / "outputs" / "2026-01-02"
    assert folders == [day / "03-04-05_a%3Ab", day / "03-04-05_a%3Ab-2"]
    assert sorted(day.iterdir()) == folders
