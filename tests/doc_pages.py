"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def code_blocks(page: Path, *languages: str) -> list[str]:
    """The fenced code blocks of a page in these languages, in order. A fence without a language has the language ""."""
    found: list[str] = []
    language, lines = None, []
    for line in page.read_text().splitlines():
        if language is None and line.startswith("```"):
            language, lines = line[3:].strip(), []
        elif language is not None and line.startswith("```"):
            if language in languages:
                found.append("".join(f"{inside}\n" for inside in lines))
            language = None
        elif language is not None:
            lines.append(line)
    assert language is None, f"{page} has a code block that does not end"
    return found


def copy_project(to: Path) -> Path:
    """Copy the project's code and config, so that commands run in a project root of their own."""
    for folder in ("src", "conf", "sweeps"):
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", to)
    return to
