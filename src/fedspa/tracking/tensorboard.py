"""A run for TensorBoard: curves by round, the config and the pictures, in the folder tensorboard/ of the run's own.

TensorBoard takes every file that it finds there. A run that goes on writes them anew from its tables, so that no round
is there twice.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fedspa.core.errors import UserError
from fedspa.core.names import final_metrics
from fedspa.core.records import RoundRecord
from fedspa.core.tracker import RunInfo, RunResult
from fedspa.tracking.run_folder import RoundReader

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
"""In the run's own. `tensorboard --logdir outputs` finds it there, and calls the run by the path."""


@dataclass(kw_only=True)
class TensorBoard:
    """Writes the files that `tensorboard --logdir <folder>` shows. Raises `UserError` if TensorBoard is missing."""

    name: str = "tensorboard"

    def __post_init__(self) -> None:
        if find_spec("tensorboard") is None:
            raise UserError("loggers.tensorboard needs TensorBoard: pip install 'fedspa[tensorboard]'.")
        self._writer: SummaryWriter | None = None

    def start(self, info: RunInfo) -> None:
        from omegaconf import OmegaConf
        from torch.utils.tensorboard import SummaryWriter

        self._info, folder = info, info.folder / FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        self._rounds = RoundReader(info.folder)
        self._writer = SummaryWriter(str(folder))
        config = OmegaConf.to_yaml(OmegaConf.create(info.config))
        self._writer.add_text("config", "".join(f"    {line}\n" for line in config.splitlines()))
        self._add_picture("partition")
        self._add_rounds()
        self._writer.flush()

    def round(self, record: RoundRecord) -> None:
        self._add_rounds()

    def finish(self, result: RunResult) -> None:
        self._add(final_metrics(result.summary), self._info.rounds)
        for picture in ("accuracy", "theory"):
            self._add_picture(picture)
        self._close()

    def abort(self, status: str, reason: str) -> None:
        if self._writer:
            self._writer.add_text("ended", f"{status}: {reason}")
        self._close()

    def _add_rounds(self) -> None:
        for round, _, values in self._rounds.new():
            self._add(values, round)

    def _add(self, metrics: Mapping[str, float], step: int) -> None:
        assert self._writer
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def _add_picture(self, name: str) -> None:
        import numpy as np
        from PIL import Image

        file = self._info.folder / f"{name}.png"
        if file.exists() and self._writer:
            pixels = np.asarray(Image.open(file).convert("RGB"))
            self._writer.add_image(f"pictures/{name}", pixels, dataformats="HWC")

    def _close(self) -> None:
        if self._writer:
            self._writer.close()
            self._writer = None
