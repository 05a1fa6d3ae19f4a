"""What the benchmarks share: federations, the plain loop that they are held against, timing in turns, tables."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fedspa.core.launch import ALONE, Launch
from fedspa.runs.rank_group import RankGroup

if TYPE_CHECKING:
    from fedspa.runs.assembly import Federation

Row = dict[str, Any]

EMNIST = (
    *("dataset=synthetic", "partition=iid", "model=lenet5", "dataset.image_size=28", "dataset.classes=26"),
    *(
        "dataset.test_size=14800",
        "dataset.client_test_images=100",
        "training.epochs=5",
        "training.batch_size=128",
    ),
)
"""Images and training of the paper's EMNIST runs, made up; clients and training images are left to be set."""


def federation(*overrides: str, launch: Launch = ALONE, group: RankGroup | None = None) -> Federation:
    """A federation by the words of src/train.py; it writes no files. `group`: the launch's ranks, joined."""
    from hydra import compose, initialize_config_dir

    from fedspa.config.plan import check
    from fedspa.config.schema import register
    from fedspa.core.paths import config_dir
    from fedspa.runs import assembly

    register()
    fixed = ["logger=none", "federation.rounds=50000", "dataset.least_test_share=0"]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return assembly.build(check(compose("config", overrides=[*fixed, *overrides])), launch, group)


class PlainLeNet5(nn.Sequential):
    """LeNet5 as one writes it down."""

    def __init__(self) -> None:
        super().__init__(
            *(
                nn.Conv2d(1, 20, 5),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(20, 50, 5),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ),
            *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 26)),
        )


def plain_training(
    client: nn.Module, start: dict[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor,
    rows: torch.Tensor, epochs: int, batch_size: int = 128,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Local training as one writes it down: from `start`, on uint8 images [N, C, H, W]; gives the weights after it."""
    client.load_state_dict(start)
    optimizer = torch.optim.SGD(client.parameters(), lr=0.1, weight_decay=5e-4)
    for _ in range(epochs):
        for batch in rows[torch.randperm(len(rows))].split(batch_size):
            optimizer.zero_grad()
            pixels = (images[batch].float() / 255 - 0.5) / 0.25
            nn.functional.cross_entropy(client(pixels), labels[batch]).backward()
            nn.utils.clip_grad_norm_(client.parameters(), 10)
            optimizer.step()
    return client.state_dict()


def seconds(work: Callable[[], Any]) -> float:
    """Wall-clock seconds that some work takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def cpu_seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of this process, all threads together: what counts for work on one thread of a busy machine."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def in_turns(repeats: int, works: Sequence[Callable[[], float]], warm: int = 1) -> list[float]:
    """The median of what each work returns, over so many turns in which each comes once; `warm` turns do not count."""
    turns = [[work() for work in works] for _ in range(warm + repeats)]
    return [median(turn[index] for turn in turns[warm:]) for index in range(len(works))]


def repeats(default: int) -> int:
    """The first word of the command line, or the default."""
    return int(sys.argv[1]) if len(sys.argv) > 1 else default


def report(rows: Iterable[Row]) -> list[Row]:
    """Print each row as a line of JSON as it comes, then all as a table; return them."""
    kept = []
    for row in rows:
        print(json.dumps(row), flush=True)
        kept.append(row)
    print("\n" + table(kept))
    return kept


def table(rows: Sequence[Row]) -> str:
    """Rows of equal keys as a table in Markdown."""
    lines = [
        list(rows[0]),
        ["---"] * len(rows[0]),
        *([_text(value) for value in row.values()] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
