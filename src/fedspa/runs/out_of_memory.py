"""Reports too little memory as a sentence that names the settings to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fedspa.config.plan import Plan
from fedspa.core.errors import UserError, brief
from fedspa.core.out_of_memory import ran_out


@contextmanager
def explains_memory(plan: Plan) -> Iterator[None]:
    """Raise one `UserError` for the many errors that mean too little memory, with the settings that need less."""
    training, tests, hardware = plan.settings.training, plan.settings.eval, plan.hardware
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not ran_out(error):
            raise
        if any(word in str(error) for word in ("CUDA", "HIP", "CUBLAS")):
            where = "The GPU has"
            other = f"use a narrower hardware.precision={hardware.precision}, such as bf16-mixed"
        else:
            where, other = (
                "There is",
                f"lower hardware.workers={hardware.workers or 'null (one for each core)'}",
            )
        raise UserError(
            f"{where} too little memory ({brief(error)}): lower training.batch_size={training.batch_size} or "
            f"eval.batch_size={tests.batch_size}, or {other}."
        ) from error
