"""Running out of memory, told as a sentence that says which settings to lower."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fedspa.errors import UserError, brief

if TYPE_CHECKING:
    from fedspa.config import Plan

Run = TypeVar("Run", bound=Callable[..., Any])

PHRASES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""How torch's errors speak of it: of the GPU (torch.OutOfMemoryError and others), and of the CPU's allocator."""


def ran_out(error: BaseException) -> bool:
    """Whether memory ran out, of the device or of the machine.

    Another error may follow from that: a capture of CUDA calls that runs out of memory ends as an invalid capture.
    """
    cause: BaseException | None = error
    while cause is not None and not _tells_of_memory(cause):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def _tells_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    told = isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in PHRASES)
    return told or isinstance(error, MemoryError)


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
