"""Deliver to MLflow what its server did not take while a run was going.

python src/deliver.py <folder of a run> ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedspa.core.errors import UserError
from fedspa.runs.interruption import ends_when_interrupted
from fedspa.runs.streams import ends_with_its_reader


@ends_with_its_reader
@ends_when_interrupted
def main(folders: list[str]) -> int:
    """Deliver the rest of each run; returns the exit code."""
    if not folders or {"--help", "-h"} & set(folders):
        print(__doc__)
        return 0 if folders else 2

    from fedspa.tracking.undelivered import Undelivered

    code = 0
    for folder in map(Path, folders):
        try:
            Undelivered.load(folder).deliver(folder)
            print(f"Delivered: {folder}")
        except UserError as error:
            print(f"Error: {error}", file=sys.stderr)
            code = 2
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
