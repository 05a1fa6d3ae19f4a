"""The page that maps the paper to the source says what the source says."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "paper.md").read_text()
QUOTES = re.findall(r"`(fedspa\.[\w.]+)`\n\n```python\n(.*?)```", PAGE, re.DOTALL)


def found(path: str) -> Any:
    """The module, class or function of that dotted path."""
    names = path.split(".")
    for i in range(len(names), 0, -1):
        try:
            thing = import_module(".".join(names[:i]))
        except ModuleNotFoundError:
            continue
        for name in names[i:]:
            thing = getattr(thing, name)
        return thing
    raise AssertionError(f"nothing is called {path}")


@pytest.mark.parametrize(("path", "quote"), QUOTES, ids=[path for path, _ in QUOTES])
def test_quoted_lines_stand_in_that_object(path: str, quote: str) -> None:
    source = [line.strip() for line in inspect.getsource(found(path)).splitlines()]
    lines = [line.strip() for line in dedent(quote).strip().splitlines()]
    assert any(source[i : i + len(lines)] == lines for i in range(len(source))), (
        f"{path} does not say:\n{quote}"
    )


def test_everything_named_exists() -> None:
    names = set(re.findall(r"`(fedspa\.[\w.]+)`", PAGE))
    assert len(names) > 20 and len(QUOTES) > 12
    for name in names:
        found(name)


def test_every_study_named_exists() -> None:
    sweeps = (Path(__file__).parents[1] / "sweeps").glob("*.yaml")
    studies = {file.stem for file in sweeps if "hydra/sweeper=search" not in file.read_text()}
    assert set(re.findall(r"`sweep=(\w+)`", PAGE)) == studies
