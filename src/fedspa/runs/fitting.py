"""Whether a data set fits into memory, told before it is read: all images lie there decoded, a byte a value."""

from __future__ import annotations

from math import isqrt
from pathlib import Path

import torch

from fedspa.core.errors import UserError
from fedspa.costs.units import show_bytes
from fedspa.data.source import ImageSource

SHARE = 0.9
"""Of the memory that is free, so much may be images."""
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def check_fits(source: ImageSource, device: torch.device, processes: int = 1) -> None:
    """Raise `UserError` where the images do not fit into the memory of this machine, or of the device.

    `processes`: how many on this machine will read them, each for itself; none may have begun.
    """
    _check(source, source.images_in_memory(), free_memory(), processes, "this machine")
    if device.type == "cuda":
        _check(
            source, source.images_in_memory(copies=False), torch.cuda.mem_get_info(device)[0], 1, "the GPU"
        )


def _check(source: ImageSource, held: int, free: int | None, processes: int, whose: str) -> None:
    """`held`: images that lie in the memory of each process."""
    needed = processes * held * source.image_bytes
    if free is None or needed <= SHARE * free:
        return
    room = int(SHARE * free) // processes
    train, test = source.effective_train_size, source.effective_test_size
    side = isqrt(room // (held * source.channels))
    rows = (room // source.image_bytes - test) // ((held - test) // train)
    ways = (
        [f"dataset.image_size={side} with dataset.resize=crop"] if hasattr(source, "resize") and side else []
    )
    ways.append(
        f"dataset.train_rows={rows}" if rows > 0 else "smaller dataset.train_rows and dataset.test_rows"
    )
    where = f"the memory of {processes} processes" if processes > 1 else "memory"
    copied = (
        ", those for training twice because of dataset.augmentation.crop_padding"
        if held > train + test
        else ""
    )
    raise UserError(
        f"dataset={source.name}: {train + test:,} images of {source.channels} x {source.image_size} x "
        f"{source.image_size} take {show_bytes(needed)} in {where}{copied}, but {whose} has {show_bytes(free)} "
        f"left: {', or '.join(ways)} would fit."
    )


def free_memory() -> int | None:
    """Bytes that this process may still take, within the limit of its container; None where that cannot be told."""
    found = [amount for amount in (_of_machine(), _of_container()) if amount is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):  # not Linux
        return None


def _of_container() -> int | None:
    """What cgroup v2 leaves; its page cache can be had."""
    try:
        limit = int((CGROUP / "memory.max").read_text())  # "max" where there is none
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        cache = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    except (OSError, ValueError):
        return None
    return max(limit - used + cache, 0)
