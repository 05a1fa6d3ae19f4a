"""What the C library does with memory that a training step frees."""

from __future__ import annotations

import ctypes
import sys

# Of <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Have this process keep the memory that it frees, for the next step, and say whether it can.

    Every step allocates and frees the same activations. Left alone, glibc gives blocks of such a size back to the
    system, which has to map and clear each page anew at its first touch: a tenth of a step of LeNet5 on a CPU,
    and more where several processes do so at once. The process then stays as large as its largest step, which
    the next step needs anyway. Only Linux with glibc has this knob.
    """
    if sys.platform != "linux":
        return False
    try:
        tune = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(tune(M_MMAP_MAX, 0) and tune(M_TRIM_THRESHOLD, 2**31 - 1))
