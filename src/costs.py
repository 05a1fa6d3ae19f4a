"""Print the FLOPs and traffic of a run before it runs; nothing is trained.

    python src/costs.py experiment=cifar10_iid sparsity=0.5               as tables
    python src/costs.py experiment=cifar10_iid sparsity=0.5 format=json   as JSON and nothing else
    python src/costs.py experiment=cifar10_iid costs.convention=paper     counted as the paper does

It takes every group and value that src/train.py takes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from fedspa.cli import main
from fedspa.config.plan import Plan
from fedspa.core.errors import check_choice
from fedspa.core.settings import Config


@dataclass
class CostConfig(Config):
    """The settings of a run, and the form of the output."""

    dry_run: bool = True
    """A sweep's jobs are listed, not run."""
    format: str = "table"
    """table, or json: nothing but JSON on standard output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("format", self.format, ("table", "json"))


def costs(plan: Plan, folder: Path) -> None:
    """The costs of one run; `folder` stays empty."""
    # Imported here since it brings torch: see fedspa.core.lazy_torch.
    from rich.console import Console

    from fedspa.planning.cost_report import CostReport
    from fedspa.planning.cost_tables import show
    from fedspa.runs.memory import keep_freed_memory

    keep_freed_memory()  # updates of full size are counted one after another
    report = CostReport.of(plan)
    assert isinstance(plan.settings, CostConfig)
    if plan.settings.format == "json":
        print(json.dumps(report.as_dict(), indent=2))
    else:
        Console(highlight=False, markup=False).print(show(report))


if __name__ == "__main__":
    sys.exit(main(costs, __doc__, CostConfig))
