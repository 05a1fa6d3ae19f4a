"""Train: `python src/train.py mask=dst sparsity=0.5`. `--help` shows what can be set."""

from __future__ import annotations

import sys
from pathlib import Path

from fedspa.cli import main
from fedspa.config import Plan


def train(plan: Plan, folder: Path) -> None:
    """One run, its files in `folder`."""
    # Imported here because it brings torch and Lightning: seconds, spent only on a run without mistakes.
    from fedspa.experiment import run

    run(plan, folder)


if __name__ == "__main__":
    sys.exit(main(train))
