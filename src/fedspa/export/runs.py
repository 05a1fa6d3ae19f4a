"""Finds the folder of the run that the user named."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from fedspa.core.errors import UserError
from fedspa.core.paths import project_root
from fedspa.tracking.artifacts import artifacts, client_to_read

_MLFLOW_ID = re.compile(r"[0-9a-f]{32}")


def run_folder(run: str) -> Path:
    """The folder of a finished run: `run` itself, the folder of that name under outputs/, or an MLflow run's artifacts.

    Raises `UserError` for a run that is unknown, or has not finished.
    """
    folder = Path(run) if os.path.isdir(run) else _named(run)
    if not (folder / "config.yaml").is_file():
        raise UserError(
            f"run={run} is no run: a run's folder has a config.yaml and, once finished, a summary.json."
        )
    if not (folder / "summary.json").is_file():
        raise UserError(
            f"run={run} has not finished (it has no summary.json): go on with it by resume={run}, then export."
        )
    if not (folder / "weights.safetensors").is_file():
        raise UserError(
            f"run={run} has no weights.safetensors: give the run's own folder, for MLflow gets weights only "
            "with save.upload_weights=true."
        )
    return folder


def _named(run: str) -> Path:
    if _MLFLOW_ID.fullmatch(run):
        try:
            return artifacts(client_to_read(f"run={run}"), run)
        except UserError as error:
            raise UserError(f"run={run}: {error}.") from error
    known = {file.parent.name: file.parent for file in sorted(project_root().glob("outputs/*/*/config.yaml"))}
    if run in known:
        return known[run]
    close = get_close_matches(run, known, n=2, cutoff=0.5)  # there may be hundreds: not all are named
    paths = " or ".join(os.path.relpath(known[name]) for name in close)
    hint = f"did you mean {paths}?" if paths else "give the folder of one."
    raise UserError(f"run={run} is neither a run's folder nor the id of a run in MLflow: {hint}")
