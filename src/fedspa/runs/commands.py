"""Commands without a config. `fedspa.cli` has those with one."""

from __future__ import annotations

import sys
from collections.abc import Callable

from fedspa.core.errors import UserError
from fedspa.runs.interruption import command


@command
def main(task: Callable[[list[str]], int | None], usage: str | None) -> int:
    """Run `task` with the words of the command line; without words, or for --help, print `usage`.

    Returns the exit code: that of `task`, or 0; 2 after a mistake of the user, printed as one sentence; or a signal's.
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
