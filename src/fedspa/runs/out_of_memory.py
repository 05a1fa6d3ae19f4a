"""Reports too little memory as a sentence that names the settings to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fedspa.config.plan import Plan
from fedspa.core.errors import UserError, brief
from fedspa.core.out_of_memory import ran_out


@contextmanager
def explains_memory(plan: Plan, lanes: int | None = None) -> Iterator[None]:
    """Raise one `UserError` for the many errors that mean too little memory.

    `lanes`: the engine's number of them; None before the engine is built.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not ran_out(error):
            raise
        raise UserError(too_little_memory(plan, error, lanes)) from error


def too_little_memory(plan: Plan, error: BaseException, lanes: int | None = None) -> str:
    """The sentence: the kind of memory, and the settings that need less."""
    settings, hardware = plan.settings, plan.hardware
    batches = (
        f"training.batch_size={settings.training.batch_size}, eval.batch_size={settings.eval.batch_size}"
    )
    if any(word in str(error) for word in ("CUDA", "HIP", "CUBLAS")):
        remedies = [f"lower {batches}"]
        asked: int | None = getattr(plan.engine, "lanes", None)
        if (asked if lanes is None else lanes) not in (None, 0, 1):
            remedies.append("use engine.lanes=1")
        if hardware.precision != "bf16-mixed":
            remedies.append(f"use hardware.precision=bf16-mixed instead of {hardware.precision}")
        return f"The GPU has too little memory ({brief(error)}): {', or '.join(remedies)}."
    workers = hardware.workers or "null (one for each core)"
    return f"There is too little memory ({brief(error)}): lower {batches} or hardware.workers={workers}."
