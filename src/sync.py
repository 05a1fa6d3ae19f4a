"""Send to MLflow everything of runs that its tracking store lacks. It is read from the runs' folders.

python src/sync.py <folder of a run, or of several> ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedspa.core.errors import UserError
from fedspa.runs.commands import main


def sync(folders: list[str]) -> int:
    """Bring the mirror of each run up to date; 2 if one could not be."""
    from fedspa.tracking.mirror import ABOUT, Mirror
    from fedspa.tracking.store import store_needed

    code = 0
    for folder in map(Path, folders):
        for run in sorted(file.parent for file in folder.rglob(ABOUT)) or [folder]:
            try:
                mirror = Mirror(run)
                with store_needed(mirror.uri, "start or mend it, then sync again"):
                    mirror.sync()
                print(f"In MLflow: {run}")
            except UserError as error:
                print(f"Error: {error}", file=sys.stderr)
                code = 2
    return code


if __name__ == "__main__":
    sys.exit(main(sync, __doc__))
