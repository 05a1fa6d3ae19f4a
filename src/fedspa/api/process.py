"""Training inside the user's own process. The user's torch threads, random numbers and algorithms are restored."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from omegaconf import DictConfig

from fedspa.core.errors import UserError
from fedspa.core.launch import usable_cores


def threads_of_torch() -> int:
    """The number of threads on which torch may compute in this process; 1 if it is not loaded yet."""
    return sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 1


def stay_in_one_process(config: DictConfig, threads: int) -> None:
    """Set no worker processes: a fork of a process whose torch has computed on several threads may hang.

    Raises `UserError` if the user has set workers.
    """
    torch, hardware = sys.modules["torch"], config.hardware
    if hardware.get("accelerator", "auto") != "cpu" and torch.cuda.is_available():  # a GPU run has no workers
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
    """Warn once, at the line of the user's code that called fedspa."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] == "fedspa":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


@contextmanager
def torch_as_it_was(threads: int) -> Iterator[None]:
    """Restore the user's torch threads, random numbers and choice of algorithms after a run."""
    import torch

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32 = before
