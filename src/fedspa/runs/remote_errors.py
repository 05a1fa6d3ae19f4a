"""Exceptions that travel from one process of a run to another."""

from __future__ import annotations

import pickle
import traceback


def portable(error: BaseException, where: str) -> BaseException:
    """The error, or one that says the same where it cannot be pickled, with a note of where it was raised.

    `where`: the process, such as "rank 1".
    """
    place = f"In {where}:\n" + "".join(traceback.format_tb(error.__traceback__))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    error.add_note(place)
    return error
