"""Tunes the C library's treatment of memory that a training step frees."""

from __future__ import annotations

import ctypes

# Of <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Make this process keep freed memory for the next step. Returns True if that is possible.

    Every step allocates and frees the same activations. By default glibc returns blocks of such a size to the
    system, which has to map and clear each page anew at its first touch: a tenth of a step of LeNet5 on a CPU,
    and more where several processes do so at once. The process then stays as large as its largest step, which
    the next step needs anyway. Only Linux with glibc has this knob.
    """
    try:
        tune = ctypes.CDLL(None).mallopt
    except (AttributeError, TypeError):  # another C library, or Windows
        return False
    return bool(tune(M_MMAP_MAX, 0) and tune(M_TRIM_THRESHOLD, 2**31 - 1))
