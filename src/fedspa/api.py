"""fedspa from Python: `run` trains, `load` reads what runs have left. docs/api.md shows how."""

from __future__ import annotations

import operator
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from fedspa.core.errors import UserError, check_choice
from fedspa.core.launch import launched, usable_cores
from fedspa.report.runs import folders_under, read_runs
from fedspa.report.tidy import tidy
from fedspa.tracking.run_reader import RunFiles, Unreadable

if TYPE_CHECKING:
    from torch import nn

KINDS = ("personal", "local", "global")
"""The kinds of model that a run's folder can give back."""


@dataclass(frozen=True, eq=False, repr=False)
class Run(RunFiles):
    """A finished run: `rounds`, `clients` and `timing` (pandas), `summary` and `config` (dicts), `folder` (a Path)."""

    def model(self, client: int | None = None, kind: str = "personal") -> nn.Module:
        """A client's model, made anew at each call: a module in evaluation, without gradients.

        It takes pixels in [0, 1], float32 [batch, channels, height, width], normalises them itself, and gives logits
        [batch, classes].

        Args:
            client: from 0; None for a global model that is the same for all.
            kind: personal, local (where the run has `save.local`), or global.

        Raises `UserError` where the run has no such model, or did not keep it.
        """
        check_choice("kind", kind, KINDS)
        there = [other for other in KINDS if self.summary["accuracy"].get(other)]
        if kind not in there:
            raise UserError(
                f"kind={kind} is no model of this run, whose method is {self.summary['method']}: it has "
                f"kind={' or '.join(there)}."
            )
        if client is None and kind != "global":
            raise UserError(f"kind={kind} is a model of one client: say whose by client=<number, from 0>.")
        if client is not None:
            client = _number(client)
        from fedspa.export.stored_run import StoredRun

        return StoredRun(self.folder).model(kind, client).module

    def __repr__(self) -> str:
        accuracy = self.summary["accuracy"]
        means = [f"{kind} {spread['mean']:.2f} %" for kind, spread in accuracy.items() if spread]
        return f"<fedspa.Run {self.config.get('name', self.name)}: {', '.join(means)}; in {self.folder}>"


def run(
    *words: str, folder: str | os.PathLike[str] | None = None, quiet: bool = False, **settings: Any
) -> Run:
    """Train in this process, and return the finished run.

    Nothing follows the run but its own folder: no pictures, no MLflow. `logger="mlflow"` has it tracked.

    Where torch computes on several threads already, the clients are trained one after another in this process, and a
    warning says so once: worker processes need a process in which torch has one thread.

    Args:
        words: settings as on the command line, such as "method=fedspa" or "training.lr=0.05".
        folder: for the run's files; None for outputs/<date>/<time>_<name>.
        quiet: print no progress.
        settings: settings by name. A text chooses in a group (dataset="digits"), a dict sets what a section or a
            group holds (training={"lr": 0.05}).

    Raises `UserError` for a mistake, in one sentence, before training starts where that is possible.
    """
    if (ranks := launched().size) > 1:
        raise UserError(f"fedspa.run is one process, but here are {ranks} ranks: use python src/train.py.")
    threads = _threads_of_torch()
    from fedspa.checkpoints.resuming import place
    from fedspa.config.composing import composed
    from fedspa.config.plan import check
    from fedspa.runs import experiment

    with _explained(words):
        config, command = composed(words, settings)
    if threads > 1:
        _stay_in_one_process(config, threads)
    plan = check(config)
    if plan.settings.dry_run:
        raise UserError("dry_run=True trains nothing, so there is no run to return: leave it out.")
    with _own_folder(folder, Path(command.run.dir)) as own:
        found = place(plan, own, given=folder is not None)
        if not found.finished:
            with _torch_as_it_was(threads):
                experiment.run(plan, found.folder, quiet=quiet)
    return _read(found.folder)


def load(path: str | os.PathLike[str]) -> Run | pd.DataFrame:
    """Read finished runs.

    Of the folder of one run: that run. Of a folder with runs below it: all of them as one tidy table, a row for each
    run, tested round, kind of model and metric. Runs that have not finished or cannot be read are left out, and a
    warning names the first.

    Raises `UserError` where there is no run that can be read.
    """
    root = Path(path)
    if (root / "config.yaml").is_file():
        return _read(root)
    found = read_runs(folders_under(root))
    if found.left_out:
        (name, why), count = found.left_out[0], len(found.left_out)
        of = f"{count} of {count + len(found.runs)} runs below {root}"
        warnings.warn(f"Left out: {of}, as {name}: {why}.", stacklevel=2)
    return tidy(found.runs)


def _read(folder: Path) -> Run:
    try:
        return Run.read(folder)
    except Unreadable as error:
        raise UserError(f"{folder} cannot be loaded: {error}.") from error


def _number(client: object) -> int:
    """A client's number, of NumPy too. Raises `UserError` for anything else."""
    with suppress(TypeError):
        if not isinstance(client, bool) and (number := operator.index(client)) >= 0:  # type: ignore[arg-type]
            return number
    raise UserError(f"client={client!r} is not a client's number: they are counted from 0.")


@contextmanager
def _explained(words: Sequence[str]) -> Iterator[None]:
    """Make one sentence of what Hydra and OmegaConf find wrong with settings."""
    from fedspa.cli import explain_hydra

    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise explain_hydra(error, words) from error


@contextmanager
def _own_folder(wanted: str | os.PathLike[str] | None, default: Path) -> Iterator[Path]:
    """The folder of a run; one that is made here goes again if nothing was written to it.

    Raises `UserError` where nothing can be written there, or where another run lies there.
    """
    from fedspa.cli import UNWRITABLE, unwritable
    from fedspa.runs.folders import new_folder

    own = default if wanted is None else Path(wanted)
    there = wanted is not None and own.is_dir()
    try:
        try:
            if wanted is None:
                own = new_folder(default)
            else:
                own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(error) from error
        try:
            yield own
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            raise unwritable(error) from error
    except UserError as error:  # the command line's name of the folder
        if "hydra.run.dir" not in str(error):
            raise
        raise UserError(str(error).replace("hydra.run.dir", "folder")) from error
    finally:
        with suppress(OSError):
            if not there:
                own.rmdir()
            if wanted is None:
                own.parent.rmdir()  # the day's


def _threads_of_torch() -> int:
    """On how many threads torch may compute in this process already; 1 where it is not loaded yet."""
    return sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 1


def _stay_in_one_process(config: DictConfig, threads: int) -> None:
    """Have no worker processes: a fork of a process whose torch has computed on several threads may hang.

    Raises `UserError` where the user asked for them.
    """
    torch, hardware = sys.modules["torch"], config.hardware
    if hardware.get("accelerator", "auto") != "cpu" and torch.cuda.is_available():  # which has none anyway
        return
    workers = hardware.get("workers")
    remedy = "call torch.set_num_threads(1) before anything is computed"
    if workers is None:
        config.hardware = {**hardware, "workers": 1}
        if usable_cores() > 1:
            _say_once(
                f"torch computes on {threads} threads here, so the run stays in one process. For worker processes "
                f"{remedy}."
            )
    elif workers != 1:
        raise UserError(
            f"hardware.workers={workers} needs a process in which torch computes on one thread, and here it has "
            f"{threads}: {remedy}, or leave hardware.workers out."
        )


@cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=4)


@contextmanager
def _torch_as_it_was(threads: int) -> Iterator[None]:
    """Give the caller's torch its threads and its choice of algorithms back after a run."""
    import torch

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32 = before
