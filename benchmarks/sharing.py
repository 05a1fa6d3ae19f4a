"""A round shared out among worker processes and among ranks: `python benchmarks/sharing.py [turns]`.

LeNet5 with DST, 8 client updates of an epoch of 1,248 images of 28 x 28, batch 128, and the tests of all clients'
models: on one process, on as many workers as there are cores, and on as many ranks, each with one thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from bench import EMNIST, Row, federation, in_turns, repeats, report

from fedspa.core.launch import launched, usable_cores
from fedspa.runs.rank_group import joined

WORDS = (
    *EMNIST, "training.epochs=1", "mask=dst", "federation.clients=8", "federation.clients_per_round=8", "hardware=cpu",
    "dataset.train_size=9984",
)  # fmt: skip
ROUND = "round"
"""The word by which this file is started for one measurement."""


def rows(turns: int) -> Iterator[Row]:
    cores = usable_cores()
    works = {"one process": (1, 1), "workers": (cores, 1), "ranks": (1, cores)}
    medians = in_turns(turns, [partial(measured, *processes) for processes in works.values()], warm=0)
    for (name, processes), seconds in zip(works.items(), medians, strict=True):
        yield {"run": name, "processes": max(processes), "round_s": seconds, "speed": medians[0] / seconds}


def measured(workers: int, ranks: int) -> float:
    """Seconds of a round, in processes of its own."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    )
    done = subprocess.run(
        [sys.executable, *launcher, __file__, ROUND, str(workers)], stdout=subprocess.PIPE, text=True, check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return float(done.stdout.splitlines()[-1])


def second_round(workers: int) -> float:
    """Seconds of a run's second round, on this process and what it starts, or on this rank."""
    with joined(launched()) as group:
        made = federation(*WORDS, f"hardware.workers={workers}", launch=launched(), group=group)
        run = made.loop.rounds()
        next(run)
        spent = next(run).seconds["total"]
        made.executor.close()
    return spent


if __name__ == "__main__":
    if ROUND in sys.argv:
        answer = second_round(int(sys.argv[2]))
        if launched().main:
            print(answer)
    else:
        report(rows(repeats(3)))
