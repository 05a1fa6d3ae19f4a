"""The page that maps the paper to the source names what there is."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[1] / "docs" / "paper.md").read_text()


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


def test_everything_named_exists() -> None:
    names = set(re.findall(r"`(fedspa\.[\w.]+)`", PAGE))
    assert len(names) > 20
    for name in names:
        found(name)


def test_every_study_named_exists() -> None:
    sweeps = (Path(__file__).parents[1] / "sweeps").glob("*.yaml")
    studies = {file.stem for file in sweeps if "hydra/sweeper=search" not in file.read_text()}
    assert set(re.findall(r"`sweep=(\w+)`", PAGE)) == studies
