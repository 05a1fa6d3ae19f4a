"""Too little memory, told as a sentence that says which settings to lower."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from fedspa.config.plan import Plan
from fedspa.core.errors import UserError, brief
from fedspa.core.out_of_memory import ran_out

Run = TypeVar("Run", bound=Callable[..., Any])


def tells_of_memory(run: Run) -> Run:
    """Have a run raise `UserError` instead of the many errors that mean too little memory."""

    @functools.wraps(run)
    def told(plan: Plan, *args: Any, **options: Any) -> Any:
        try:
            return run(plan, *args, **options)
        except (RuntimeError, MemoryError, OSError) as error:
            if not ran_out(error):
                raise
            raise UserError(too_little_memory(plan, error)) from error

    return cast(Run, told)


def too_little_memory(plan: Plan, error: BaseException) -> str:
    """The sentence: what ran out, and the settings that need less."""
    settings, hardware = plan.settings, plan.hardware
    batches = (
        f"training.batch_size={settings.training.batch_size}, eval.batch_size={settings.eval.batch_size}"
    )
    if any(word in str(error) for word in ("CUDA", "HIP", "CUBLAS")):
        return (
            f"The GPU has too little memory ({brief(error)}): lower {batches}, or use a narrower "
            f"hardware.precision={hardware.precision}, such as bf16-mixed."
        )
    workers = hardware.workers or "null (one for each core)"
    return f"There is too little memory ({brief(error)}): lower {batches} or hardware.workers={workers}."
