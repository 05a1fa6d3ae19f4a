"""Train sparse personal models by federated learning.

    python src/train.py                                        the main job, on small digits
    python src/train.py mask=rsm sparsity=0.8 dataset=mnist    any group and any value
    python src/train.py experiment=cifar10_a dry_run=true      what it would do; runs nothing
    python src/train.py experiment=cifar10_a --cfg job         the config; runs nothing
    python src/train.py -m method=fedspa,fedavg seed=0,1,2     all combinations
    python src/train.py -m sweep=sparsity                      a study: a file of sweeps/
    eval "$(python src/train.py -sc install=bash)"             groups and values by the Tab key

Values, such as sparsity=0.8 or training.lr=0.05, are all that --cfg job shows.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedspa.checkpoints.resuming import place
from fedspa.cli import log_into, main
from fedspa.config.plan import Plan
from fedspa.core.launch import launched
from fedspa.runs.folders import is_chosen


def train(plan: Plan, folder: Path) -> None:
    """One run, its files in `folder`; or with dry_run=true only what it would do and cost."""
    # Imported here since it brings torch and Lightning: see fedspa.core.lazy_torch.
    if plan.settings.dry_run:
        if not launched().main:
            return
        from fedspa.planning.dry_run import listing
        from fedspa.planning.preview import preview

        print(preview(plan), end="\n\n", flush=True)
        print(listing({plan.settings.name: plan}))
        return
    from hydra.core.hydra_config import HydraConfig

    from fedspa.runs.rank_group import joined

    with joined(launched()) as group:
        found = group.from_first(lambda: place(plan, folder, given=is_chosen(HydraConfig.get())))
        if found.finished:
            if group.main:
                print(f"Finished already: {found.folder}")
            return
        log_into(found.folder)
        from fedspa.runs.experiment import run

        run(plan, found.folder, group)


if __name__ == "__main__":
    sys.exit(main(train, __doc__))
