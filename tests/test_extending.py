"""The example of docs/extending.md, followed to the letter in a copy of the project."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

from fedspa.paths import project_root

PAGE = (project_root() / "docs" / "extending.md").read_text()


def block(language: str) -> str:
    """The page's one code block of a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


@pytest.fixture
def copy(tmp_path):
    """A copy of the project's code and config, with the example's two files in it."""
    for folder in ("src", "conf", "sweeps"):
        shutil.copytree(
            project_root() / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(project_root() / "pyproject.toml", tmp_path)
    for path, language in re.findall(r"`((?:src|conf)/\S+/lottery\.(py|yaml))`", PAGE):
        (tmp_path / path).write_text(block({"py": "python"}.get(language, language)))
    return tmp_path


def train(copy, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "src/train.py", *arguments, "logger=none", "hydra.run.dir=run"]
    return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300)


def test_two_files_make_a_mask_searcher(copy):
    ended = train(copy, "mask=lottery", "mask.share=0.2", "federation.rounds=2", "training.epochs=1")
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((copy / "run" / "summary.json").read_text())
    assert summary["mask"] == "lottery"
    assert summary["flops"]["search"] == 0
    assert summary["traffic_bytes"]["masks"] > 0

    refused = train(copy, "mask=lottery", "mask.share=2")
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    assert "mask.share=2.0 is out of range" in refused.stderr + refused.stdout


def test_the_template_of_a_plugin_is_what_the_page_says():
    template = project_root() / "examples" / "plugin"
    assert block("toml") in (template / "pyproject.toml").read_text()
    assert (template / "fedspa_example" / "lottery.py").read_text() == block("python")
    option = (template / "fedspa_example" / "conf" / "mask" / "lottery.yaml").read_text()
    assert option == block("yaml").replace("fedspa.masks.lottery", "fedspa_example.lottery")
