"""Commands as they are written, on a toy: a fork of the test process runs the entry point, everything made small."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.backends.backend_agg  # noqa: F401  (imported here, so that each fork need not)
import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
import mlflow.tracking  # noqa: F401
from matplotlib.figure import Figure
from omegaconf import DictConfig, open_dict

import fedspa.config.plan
import fedspa.core.paths
import fedspa.runs.experiment  # noqa: F401
import fedspa.studies.jobs
from fedspa.studies.jobs import Study
from fedspa.studies.search import Search

ROOT = Path(__file__).resolve().parents[1]
JOBS = 2
"""Of a study, so many jobs are run; of a search so many trials."""
TIME_LIMIT = 300
"""Seconds after which a command has failed."""

_check, _study = fedspa.config.plan.check, fedspa.studies.jobs.study
_project_root, _savefig = fedspa.core.paths.project_root, Figure.savefig


def toy(config: DictConfig) -> DictConfig:
    """The same config with one round, four clients, a small network and 48 made-up images of the same kind."""
    small = config.copy()
    facts = config.dataset
    with open_dict(small):
        small.dataset = {
            "name": facts.name,
            "_target_": "fedspa.data.synthetic.SyntheticImages",
            "classes": facts.get("classes") or 4,
            "channels": facts.get("channels") or 1,
            "image_size": facts.get("image_size") or 16,
            "train_size": 48,
            "test_size": 200,
            "mean": [0.5] * (facts.get("channels") or 1),
            "std": [0.2] * (facts.get("channels") or 1),
            "noise": 1.0,
            "client_test_images": 2,
            "val_fraction": facts.get("val_fraction", 0.0),
        }
        small.model = {"name": config.model.name, "_target_": "fedspa.models.small_cnn.SmallCNN"}
        small.partition = {"name": config.partition.name, "_target_": "fedspa.partition.iid.Iid"}
        small.merge_with(
            {
                "federation": {"rounds": 1, "clients": 4, "clients_per_round": 2},
                "training": {"batch_size": 12},
                "hardware": {"workers": 1},
                "eval": {"final_rounds": 1},
            }
        )
    return small


def small_check(config: DictConfig, *objects: Any) -> Any:
    return _check(toy(config), *objects)


def small_study(*args: Any, **kwargs: Any) -> Study:
    whole = _study(*args, **kwargs)
    return replace(whole, jobs=whole.jobs[:JOBS])


@dataclass
class SmallSearch(Search):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.trials = min(self.trials, JOBS)


def blank(figure: Figure, *args: Any, **kwargs: Any) -> None:
    """A picture is a sheet without anything on it: to draw it takes longer than a toy's training."""
    _savefig(Figure(), *args, **kwargs)


def run(words: Sequence[str], root: Path, log: Path) -> int:
    """Run `python <words>`, an entry point in src/, in a root of its own; returns its exit code."""
    root.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        os._exit(_inside(words, root, log))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _inside(words: Sequence[str], root: Path, log: Path) -> int:
    signal.alarm(TIME_LIMIT)
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.chdir(root)
    try:
        _instead(_project_root, lambda: root)
        _instead(_check, small_check)
        _instead(_study, small_study)
        _instead(Search, SmallSearch)
        Figure.savefig = blank
        sys.argv = [str(ROOT / words[0]), *words[1:]]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _instead(original: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Put `other` wherever a module of fedspa knows `original`."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("fedspa", "hydra_plugins")):
            for key, value in list(vars(module).items()):
                if value is original:
                    setattr(module, key, other)
