"""Train: `python src/train.py mask=dst sparsity=0.5`. `--help` shows what can be set."""

from __future__ import annotations

import sys
from pathlib import Path

from fedspa.cli import folder_is_given, log_into, main
from fedspa.config import Plan
from fedspa.saving.resuming import place


def train(plan: Plan, folder: Path) -> None:
    """One run, its files in `folder`; or with dry_run=true only what it would cost."""
    # Imported here because it brings torch and Lightning: seconds, spent only on a run without mistakes.
    if plan.settings.dry_run:
        from fedspa.costing.dry_run import listing

        print(listing({plan.settings.name: plan}))
        return
    found = place(plan, folder, given=folder_is_given())
    if found.finished:
        print(f"Finished already: {found.folder}")
        return
    log_into(found.folder)
    from fedspa.running.experiment import run

    run(plan, found.folder)


if __name__ == "__main__":
    sys.exit(main(train))
