"""Compiling for one engine, whatever the process has compiled before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def compiling_afresh() -> Iterator[None]:
    """Drop the variants that earlier engines compiled, and allow this one no more than torch keeps.

    torch keeps a few variants of a function in a process, and runs every further one uncompiled. Raises RuntimeError
    where this engine alone needs more.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    torch.compiler.reset()
    try:
        with config.patch(fail_on_recompile_limit_hit=True):
            yield
    except FailOnRecompileLimitHit as error:
        raise RuntimeError(
            f"it takes more than the {config.recompile_limit} variants of a function that torch.compile keeps"
        ) from error
