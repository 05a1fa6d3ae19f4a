"""`python -m fedspa train mask=dst`, or `fedspa train mask=dst`: the commands, from anywhere.

In a clone they are the files src/<command>.py; the wheel carries the same files as fedspa/commands/.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def commands() -> dict[str, Path]:
    """The files of the commands by name."""
    installed = PACKAGE / "commands"
    folder = installed if installed.is_dir() else PACKAGE.parent
    return {file.stem: file for file in sorted(folder.glob("*.py"))}


def main() -> int:
    """Run the command that the first argument names, with the others."""
    known, arguments = commands(), sys.argv[1:]
    if not arguments or arguments[0] in ("--help", "-h"):
        print(
            f"fedspa <command> [options]\n\nCommands: {', '.join(known)}; fedspa <command> --help tells more."
        )
        return 0 if arguments else 2
    if arguments[0] not in known:
        from fedspa.core.errors import nearest

        print(f"Error: {arguments[0]} is no command: {nearest(arguments[0], known)}.", file=sys.stderr)
        return 2
    file = known[arguments[0]]
    sys.argv = [str(file), *arguments[1:]]
    runpy.run_path(str(file), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
