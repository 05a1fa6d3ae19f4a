"""The folders of runs. No two runs share a folder."""

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
    """Make this folder or, if it exists, the first new one of <name>-2, <name>-3, ...

    Two processes never get the same folder. Raises `OSError` if no folder can be made.
    """
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError


def is_chosen(command: Any) -> bool:
    """True if the user or a sweep chose the folder of this run. The default folder is named by date and time.

    `command`: Hydra's part of the config, `hydra`.
    """
    chosen = any(override.startswith("hydra.run.dir=") for override in command.overrides.hydra)
    return chosen or command.mode == RunMode.MULTIRUN


class OwnFolder(Callback):
    """Gives each run a new folder, even if another run starts in the same second.

    Hydra calls it before it makes the folder in `hydra.run.dir`. A folder that the user named stays unchanged.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Make the folder, and set `hydra.run.dir`. An error is ignored, because Hydra meets it too."""
        if is_chosen(config.hydra) or not launched().main:
            return
        with suppress(OSError, OmegaConfBaseException), read_write(config), open_dict(config):
            folder = new_folder(Path(OmegaConf.select(config, "hydra.run.dir")))
            config.hydra.run.dir = str(folder)
