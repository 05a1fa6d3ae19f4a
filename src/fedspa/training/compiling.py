"""Compiles for one engine, independent of earlier compilations in the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def compiling_afresh() -> Iterator[None]:
    """Drop the variants that earlier engines compiled, since torch keeps a few variants of a function in a process.

    Raises `RuntimeError` if this engine alone needs more. Its functions are compiled with fullgraph=True, so torch runs
    none of them uncompiled.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit
    from torch._inductor import config as inductor

    torch.compiler.reset()
    if hasattr(inductor, "deterministic"):  # torch before 2.10 has no such setting
        # Otherwise inductor picks the order of sums by timing, which may differ from machine to machine.
        inductor.deterministic = torch.backends.cudnn.deterministic
    try:
        yield
    except FailOnRecompileLimitHit as error:
        raise RuntimeError(
            f"it takes more than the {config.recompile_limit} variants of a function that torch.compile keeps"
        ) from error
