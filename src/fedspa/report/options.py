"""The command line of report.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedspa.core.errors import UserError, check_range, nearest
from fedspa.core.key_values import key_values
from fedspa.core.paths import project_root

KEYS = ("sweep", "runs", "out", "paper", "targets")


@dataclass(frozen=True)
class Options:
    """The runs to report on, and the form of the report."""

    name: str
    """The study's name."""
    source: Path | str
    """A folder, or a filter of MLflow."""
    out: Path
    paper: bool = False
    targets: tuple[float, ...] = ()
    """Accuracies in percent."""

    def folders(self) -> Mapping[str, Path | UserError]:
        """The runs' folders by name, or why a run has none. Raises `UserError` where there is no run."""
        from fedspa.report.runs import folders_in_store, folders_under

        return folders_under(self.source) if isinstance(self.source, Path) else folders_in_store(self.source)


def parse(arguments: list[str]) -> Options:
    """Read `key=value` arguments. Raises `UserError` for the first mistake."""
    given = key_values(arguments, KEYS)
    if ("sweep" in given) == ("runs" in given):
        raise UserError("Say what to report on: either sweep=<name> or runs=<folder or filter of MLflow>.")
    name, source = _sweep(given["sweep"]) if "sweep" in given else _runs(given["runs"])
    out = Path(given["out"]) if "out" in given else project_root() / "outputs" / "reports" / name
    return Options(name, source, out, _paper(given.get("paper", "false")), _targets(given.get("targets", "")))


def _sweep(name: str) -> tuple[str, Path]:
    sweeps = project_root() / "outputs" / "sweeps"
    if not (sweeps / name).is_dir():
        names = [folder.name for folder in sweeps.iterdir() if folder.is_dir()] if sweeps.is_dir() else []
        known = nearest(name, names) if names else f"{sweeps} holds none yet"
        raise UserError(f"sweep={name} is not known: {known}.")
    return name, sweeps / name


def _runs(text: str) -> tuple[str, Path | str]:
    folder = Path(text)
    if folder.is_dir():
        return folder.resolve().name, folder
    if not any(word in text.lower() for word in ("=", "<", ">", " like ", " in ")):
        raise UserError(
            f"runs={text} is no folder, and a filter of MLflow looks like \"tags.dataset = 'digits'\"."
        )
    return "mlflow", text


def _paper(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UserError(f"paper={text} is not true or false.")
    return text.lower() == "true"


def _targets(text: str) -> tuple[float, ...]:
    try:
        targets = tuple(sorted(float(part) for part in text.strip("[]").split(",") if part.strip()))
    except ValueError:
        raise UserError(f"targets={text} is not a list of numbers such as targets=70,80.") from None
    for target in targets:
        check_range("targets", target, low=0, high=100)
    return targets
