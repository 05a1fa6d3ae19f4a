"""Recognises errors that mean too little memory."""

from __future__ import annotations

import errno

PHRASES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Parts of torch's messages: of the GPU (torch.OutOfMemoryError and others), and of the CPU's allocator."""


def ran_out(error: BaseException) -> bool:
    """True if the device or the machine ran out of memory.

    Another error may follow from that. For example, a capture of CUDA calls that runs out of memory ends as invalid.
    """
    cause: BaseException | None = error
    while cause is not None and not _is_memory_error(cause):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def _is_memory_error(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    from_torch = isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in PHRASES)
    return from_torch or isinstance(error, MemoryError)
