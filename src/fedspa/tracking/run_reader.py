"""Reads back what a finished run left in its folder. `run_folder` writes it, and says which file holds what."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pandas as pd
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

NEEDED = (
    *("method", "mask", "dataset", "model", "partition", "sparsity", "seed", "rounds", "clients"),
    *("accuracy", "traffic_bytes", "flops"),
)
"""What every summary says of its run."""


class Unreadable(Exception):
    """A folder holds no finished run that can be read. The message says why; it does not name the folder."""


@dataclass(frozen=True, eq=False)
class RunFiles:
    """A finished run, as its folder has it. docs/api.md lists the columns of the tables and their units."""

    name: str
    folder: Path
    config: dict[str, Any]
    """The whole config, resolved (config.yaml)."""
    summary: dict[str, Any]
    """The final numbers (summary.json)."""
    rounds: pd.DataFrame
    """A row for each round (rounds.csv)."""
    clients: pd.DataFrame
    """A row for each client at the end (clients.csv; of very many clients clients.safetensors)."""
    timing: pd.DataFrame
    """Seconds of each round (timing.csv)."""

    @classmethod
    def read(cls, folder: Path, name: str = "") -> Self:
        """Read a run's folder. `name`: what the run is called; "" for the folder's own name.

        Raises `Unreadable`.
        """
        if not (folder / "summary.json").is_file():
            raise Unreadable("it has no summary.json, so it has not finished")
        try:
            summary = json.loads((folder / "summary.json").read_text())
            if missing := [key for key in NEEDED if key not in summary]:
                raise Unreadable(f"its summary.json lacks {', '.join(missing)}")
            config: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
            if not isinstance(config, dict):
                raise Unreadable("its config.yaml holds no settings")
            rounds = _table(folder / "rounds.csv")
            if not len(rounds):
                raise Unreadable("its rounds.csv is empty")
            clients, timing = _clients(folder), _table(folder / "timing.csv")
        except KeyError as error:
            raise Unreadable(f"it lacks {error}") from error
        except (OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException) as error:
            raise Unreadable(str(error).splitlines()[0]) from error
        return cls(name or folder.resolve().name, folder, config, summary, rounds, clients, timing)


def _table(path: Path) -> pd.DataFrame:
    """A table of numbers. A column without blanks that holds whole numbers has integers; a blank is NaN."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        names = list(reader.fieldnames or ())
    return pd.DataFrame({name: _numbers([row[name] for row in rows]) for name in names})


def _numbers(cells: list[str | None]) -> list[int] | list[float]:
    """The cells of a column with all their digits, which pandas' own reader keeps only in some versions."""
    try:
        return [int(cell or "") for cell in cells]
    except ValueError:
        return [float(cell or "nan") for cell in cells]


def _clients(folder: Path) -> pd.DataFrame:
    """The last scores of each client. Of very many clients a run keeps arrays, without the counts of labels."""
    arrays = folder / "clients.safetensors"
    if not arrays.is_file():
        return _table(folder / "clients.csv")
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        columns = pd.DataFrame(load_file(arrays))
    except SafetensorError as error:
        raise ValueError(f"its {arrays.name} cannot be read ({error})") from error
    columns.insert(0, "client", range(len(columns)))
    return columns
