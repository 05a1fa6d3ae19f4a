"""The command line of report.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedspa.core.errors import UserError, check_range, nearest
from fedspa.core.paths import project_root


@dataclass
class Options:
    """The runs to report on, and the form of the report."""

    sweep: str = ""
    """The name of a study of outputs/sweeps; or else `runs`, a folder or a filter of MLflow."""
    runs: str = ""
    out: Path | None = None
    paper: bool = False
    targets: list[float] = field(default_factory=list)
    """Accuracies in percent."""

    def __post_init__(self) -> None:
        if bool(self.sweep) == bool(self.runs):
            raise UserError(
                "Say what to report on: either sweep=<name> or runs=<folder or filter of MLflow>."
            )
        self.name, self._source = _sweep(self.sweep) if self.sweep else _runs(self.runs)
        self.folder = self.out or project_root() / "outputs" / "reports" / self.name
        self.targets.sort()
        for target in self.targets:
            check_range("targets", target, low=0, high=100)

    def folders(self) -> Mapping[str, Path | UserError]:
        """The runs' folders by name, or why a run has none. Raises `UserError` where there is no run."""
        from fedspa.report.runs import folders_in_store, folders_under

        of = self._source
        return folders_under(of) if isinstance(of, Path) else folders_in_store(of)


def _sweep(name: str) -> tuple[str, Path]:
    sweeps = project_root() / "outputs" / "sweeps"
    if not (sweeps / name).is_dir():
        names = [folder.name for folder in sweeps.iterdir() if folder.is_dir()] if sweeps.is_dir() else []
        known = nearest(name, names) if names else f"{sweeps} holds none yet"
        raise UserError(f"sweep={name} is not known: {known}.")
    return name, sweeps / name


def _runs(text: str) -> tuple[str, Path | str]:
    if os.path.isdir(text):  # Path.is_dir raises an error for a filter that is too long for a file's name
        return Path(text).resolve().name, Path(text)
    if not any(word in text.lower() for word in ("=", "<", ">", " like ", " in ")):
        raise UserError(
            f"runs={text} is no folder, and a filter of MLflow looks like \"tags.dataset = 'digits'\"."
        )
    return "mlflow", text
