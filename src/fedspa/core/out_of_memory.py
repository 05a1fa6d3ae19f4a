"""Errors that mean too little memory."""

from __future__ import annotations

import errno

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
