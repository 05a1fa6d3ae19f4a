"""The folders of the project, for any current directory."""

from __future__ import annotations

import subprocess
from pathlib import Path

SET_ASIDE = "set_aside"
"""The folder in a sweep's folder for files that were in a job's way."""


def project_root() -> Path:
    """The clone that this file belongs to (it has conf/ and pyproject.toml); else the current directory."""
    for folder in Path(__file__).resolve().parents:
        if (folder / "conf").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    return Path.cwd()


def config_dir() -> Path:
    """The folder of YAML files: conf/ of the clone, or the copy inside the installed package."""
    package = Path(__file__).resolve().parents[1]
    clone = package.parents[1] / "conf"
    return clone if clone.is_dir() else package / "conf"


def git(*words: str) -> str:
    """The output of a git command in the project; "" without git or a clone."""
    try:
        done = subprocess.run(["git", *words], cwd=project_root(), capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
