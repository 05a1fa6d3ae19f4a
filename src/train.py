"""Train: `python src/train.py mask=dst sparsity=0.5`. `--help` shows what can be set."""

from __future__ import annotations

import sys
from pathlib import Path

from fedspa.cli import main
from fedspa.config import Plan


def train(plan: Plan, folder: Path) -> None:
    """One run, its files in `folder`; or with dry_run=true only what it would cost."""
    # Imported here because it brings torch and Lightning: seconds, spent only on a run without mistakes.
    if plan.settings.dry_run:
        from fedspa.dry_run import listing

        print(listing({plan.settings.name: plan}))
    else:
        from fedspa.experiment import run

        run(plan, folder)


if __name__ == "__main__":
    sys.exit(main(train))
