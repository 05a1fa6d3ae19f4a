"""Jobs side by side on a machine with several GPUs: each process of a sweep sees one of them, in turn.

Left alone they would all take the first. A process keeps the GPU of its first job, since CUDA cannot change what it
sees once it has begun.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import FileLock

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""By this variable CUDA is told which GPUs there are; ROCm heeds it too."""

_places: list[FileLock] = []
"""In a job's process: its number among those of the sweep, held until it ends."""


def take_a_gpu(folder: Path) -> None:
    """Have this process see one GPU of several: that of its number among the processes that run jobs of the sweep.

    Its number is the lowest that no living process has. `folder`: the sweep's, where they find out about each other.
    """
    if _places:
        return
    from filelock import FileLock, Timeout

    for number in count():
        place = FileLock(folder / f".place-{number}.lock", blocking=False)
        try:
            place.acquire()
        except Timeout:
            continue
        _places.append(place)
        break
    if len(gpus := _visible()) > 1:
        os.environ[VISIBLE] = gpus[number % len(gpus)]


def _visible() -> list[str]:
    """The names of the GPUs that this process may use; asking does not begin CUDA."""
    told = os.environ.get(VISIBLE)
    if told is None:
        import torch

        return [str(number) for number in range(torch.cuda.device_count())]
    return [name.strip() for name in told.split(",")]
