"""Finished runs in Python: their tables and models, and one table of many runs."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedspa.api.arguments import as_path
from fedspa.core import names
from fedspa.core.errors import UserError, check_choice
from fedspa.export.command import MODELS
from fedspa.report.runs import folders_under, read_runs
from fedspa.report.tidy import tidy
from fedspa.tracking.run_folder import RunFiles, Unreadable

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, eq=False, repr=False)
class Run(RunFiles):
    """A finished run: `rounds`, `clients` and `timing` (pandas), `summary` and `config` (dicts), `folder` (a Path)."""

    objects: Mapping[str, Any] = field(default_factory=dict)
    """The user's own objects of the run, by group of the config; empty for a loaded run."""

    def model(self, client: int | None = None, kind: str = "personal") -> nn.Module:
        """A client's model, rebuilt at each call: a module in evaluation mode, without gradients.

        It takes inputs [batch, ...] in float32, or tokens; images are pixels in [0, 1], which it normalises itself. It
        returns logits [batch, classes], or numbers [batch, K].

        Args:
            client: the client's number from 0; None for a global model that is the same for all.
            kind: personal, local (if the run has `save.local`), or global.

        Raises `UserError` if the run has no such model, or did not save it.
        """
        check_choice("kind", kind, MODELS)
        number = None if client is None else _number(client)
        from fedspa.export.stored_run import StoredRun

        return StoredRun(self.folder, self.objects).model(kind, number).module

    def __repr__(self) -> str:
        unit, metric = names.unit(self.summary), names.main_metric(self.summary)
        scores = names.final_scores(self.summary)[metric].items()
        means = [f"{kind} {names.shown(spread['mean'], unit)}{unit}" for kind, spread in scores]
        name = self.config.get("name", self.name)
        return f"<fedspa.Run {name}: {metric} {', '.join(means)}; in {self.folder}>"


def load(path: str | os.PathLike[str]) -> Run | pd.DataFrame:
    """Read finished runs.

    For the folder of one run: that run. For a folder with runs below it: all of them as one tidy table, with a row for
    each run, tested round, kind of model and metric. Unfinished and unreadable runs are left out, and a warning
    names the first of them.

    Raises `UserError` if no run can be read.
    """
    root = as_path("path", path)
    if (root / "config.yaml").is_file():
        return read(root)
    found = read_runs(folders_under(root))
    if found.left_out:
        (name, why), count = found.left_out[0], len(found.left_out)
        of = f"{count} of {count + len(found.runs)} runs below {root}"
        warnings.warn(f"Left out: {of}, as {name}: {why}.", stacklevel=2)
    return tidy(found.runs)


def read(folder: Path, objects: Mapping[str, Any] | None = None) -> Run:
    """The finished run in a folder. `objects`: the user's own objects in the run.

    Raises `UserError` if it cannot be read.
    """
    try:
        return replace(Run.read(folder), objects=objects or {})
    except Unreadable as error:
        raise UserError(f"{folder} cannot be loaded: {error}.") from error


def _number(client: object) -> int:
    """A client's number, also from NumPy. Raises `UserError` for anything but a whole number."""
    with suppress(TypeError):
        if not isinstance(client, bool):
            return operator.index(client)  # type: ignore[arg-type]
    raise UserError(f"client={client!r} is not a client's number: they are counted from 0.")
