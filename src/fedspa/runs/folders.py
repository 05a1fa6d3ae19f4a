"""The folders of runs: each run gets one of its own."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from fedspa.core.launch import launched


def new_folder(wanted: Path) -> Path:
    """Make this folder, or where it is there already the first of <name>-2, <name>-3, ... that is not.

    A folder is made by one process only, so two that want the same one get two. Raises `OSError` where none can
    be made.
    """
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError


def is_chosen(command: Any) -> bool:
    """Whether the user, or a sweep, chose the folder of this run, which otherwise a date and a time name.

    `command`: what Hydra knows of it, the config's part `hydra`.
    """
    chosen = any(override.startswith("hydra.run.dir=") for override in command.overrides.hydra)
    return chosen or command.mode == RunMode.MULTIRUN


class OwnFolder(Callback):
    """Gives each run a folder that no other run has, even one that starts in the same second.

    Hydra calls it before it makes the folder that `hydra.run.dir` names; one that the user named stays as it is.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Make the folder, and name it in `hydra.run.dir`. An error is left to Hydra, which meets it too."""
        if is_chosen(config.hydra) or not launched().main:
            return
        with suppress(OSError, OmegaConfBaseException), read_write(config), open_dict(config):
            folder = new_folder(Path(OmegaConf.select(config, "hydra.run.dir")))
            config.hydra.run.dir = str(folder)
