"""The commands that compose no config, as `fedspa.cli` has those that do."""

from __future__ import annotations

import sys
from collections.abc import Callable

from fedspa.core.errors import UserError
from fedspa.runs.interruption import command


@command
def main(task: Callable[[list[str]], int | None], usage: str | None) -> int:
    """Do what the command line says: `task` with its words, or print `usage` for --help and for no words.

    Returns the exit code: that of `task`, or 0; 2 after a mistake of the user, told in one sentence; or a signal's.
    """
    words = sys.argv[1:]
    if not words or {"--help", "-h"} & set(words):
        print(usage)
        return 0 if words else 2
    try:
        return task(words) or 0
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
