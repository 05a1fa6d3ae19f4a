"""A run for TensorBoard: curves by round, the config and the pictures, in the folder tensorboard/ of the run's own.

TensorBoard takes every file that it finds there. So a run that goes on cuts the files of its earlier starts back to
what they held at its checkpoint, and no round is there twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspa.core.errors import UserError
from fedspa.core.records import RoundRecord, RunInfo, RunResult
from fedspa.core.saved import Saved
from fedspa.tracking.measures import final_metrics, round_metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
"""In the run's own. `tensorboard --logdir outputs` finds it there, and calls the run by the path."""


@dataclass(kw_only=True)
class TensorBoard:
    """Writes what `tensorboard --logdir <folder>` shows. Raises `UserError` where TensorBoard is not installed."""

    name: str = "tensorboard"

    def __post_init__(self) -> None:
        if find_spec("tensorboard") is None:
            raise UserError("loggers.tensorboard needs TensorBoard: pip install 'fedspa[tensorboard]'.")
        self._kept: dict[str, int] = {}
        self._writer: SummaryWriter | None = None

    def state_dict(self) -> dict[str, Any]:
        if self._writer is None:
            return {}
        self._writer.flush()
        return {"bytes": {file.name: file.stat().st_size for file in self._files()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kept = Saved({"bytes": {}, **state}, "tensorboard")["bytes"]
        self._kept = {name.text(): size.integer() for name, size in kept.items()}

    def start(self, info: RunInfo) -> None:
        from omegaconf import OmegaConf
        from torch.utils.tensorboard import SummaryWriter

        self._info, self._folder = info, info.folder / FOLDER
        self._folder.mkdir(exist_ok=True)
        for file in list(self._files()):
            if file.name in self._kept:
                os.truncate(file, min(self._kept[file.name], file.stat().st_size))
            else:
                file.unlink()
        # What a TensorBoard that is open has seen of later rounds, the purge takes back.
        self._writer = SummaryWriter(
            str(self._folder), purge_step=info.completed + 1 if info.completed else None
        )
        if not info.completed:
            config = OmegaConf.to_yaml(OmegaConf.create(info.config))
            self._writer.add_text("config", "".join(f"    {line}\n" for line in config.splitlines()))
            self._add_picture("partition")
        self._writer.flush()

    def round(self, record: RoundRecord) -> None:
        self._add(round_metrics(record), record.round)

    def finish(self, result: RunResult) -> None:
        self._add(final_metrics(result.summary), self._info.rounds)
        for picture in ("accuracy", "theory"):
            self._add_picture(picture)
        self._close()

    def abort(self, status: str, reason: str) -> None:
        if self._writer:
            self._writer.add_text("ended", f"{status}: {reason}")
        self._close()

    def _add(self, metrics: Mapping[str, float], step: int) -> None:
        assert self._writer
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def _add_picture(self, name: str) -> None:
        import numpy as np
        from PIL import Image

        file = self._info.folder / f"{name}.png"
        if file.exists() and self._writer:
            self._writer.add_image(
                f"pictures/{name}", np.asarray(Image.open(file).convert("RGB")), dataformats="HWC"
            )

    def _close(self) -> None:
        if self._writer:
            self._writer.close()
            self._writer = None

    def _files(self) -> Iterator[Path]:
        return self._folder.glob("events.out.tfevents.*")
