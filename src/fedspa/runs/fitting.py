"""Refuses a data set that does not fit into memory before it is read. All images are decoded there, a byte a value."""

from __future__ import annotations

from pathlib import Path

import torch

from fedspa.core.errors import UserError
from fedspa.costs.units import show_bytes
from fedspa.data.source import Source

SHARE = 0.9
"""The largest share of the free memory for images."""
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def check_fits(source: Source, device: torch.device, processes: int = 1) -> None:
    """Raise `UserError` if the examples do not fit into the memory of this machine, or of the device.

    `processes`: the number of processes on this machine that will read the data; none may have begun.
    """
    _check(source, processes * source.rows_in_memory(), free_memory(), "this machine")
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        _check(source, source.rows_in_memory(copies=False), free, "the GPU")


def _check(source: Source, rows: int, free: int | None, whose: str) -> None:
    """Raise `UserError` unless `rows` rows, copies included, fit into `free` bytes."""
    needed = rows * source.row_bytes
    if free is None or needed <= SHARE * free:
        return
    rows_read = source.effective_train_size + source.effective_test_size
    smaller = "a smaller dataset.image_size, or " if hasattr(source, "resize") else ""
    raise UserError(
        f"dataset={source.name}: {rows_read:,} {source.shape_text} take {show_bytes(needed)} in memory, but {whose} "
        f"has {show_bytes(free)} left: use {smaller}{SHARE * free / needed:.1%} of the {source.things} by "
        "dataset.train_rows and dataset.test_rows."
    )


def free_memory() -> int | None:
    """The bytes that this process may still take, within the limit of its container; None if Linux does not say."""
    try:
        values = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        free = int(values["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
    try:
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no cgroup of version 2, or no limit
        return free
    return min(free, max(limit - used + int(stat["inactive_file"]), 0))  # the page cache can be freed
