"""A round shared out among worker processes and among ranks: `python benchmarks/sharing.py [rounds]`.

LeNet5 with DST, 8 visits of an epoch of 1,248 images of 28 x 28, batch 128, and the tests of all clients' models: on
one process, on as many workers as there are cores, and on as many ranks, each with one thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from statistics import median

from bench import EMNIST, Row, federation, repeats, report

from fedspa.running.joining import joined
from fedspa.running.launch import launched, usable_cores

WORDS = (
    *EMNIST, "training.epochs=1", "mask=dst", "federation.clients=8", "federation.clients_per_round=8", "hardware=cpu",
    "dataset.train_size=9984",
)  # fmt: skip


def rows(rounds: int) -> Iterator[Row]:
    cores, alone = usable_cores(), None
    for name, workers, ranks in (("one process", 1, 1), ("workers", cores, 1), ("ranks", 1, cores)):
        start = [sys.executable]
        if ranks > 1:
            start = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc_per_node={ranks}",
            ]
        done = subprocess.run(
            [*start, __file__, str(rounds), str(workers)], stdout=subprocess.PIPE, text=True, check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        told = json.loads(done.stdout.splitlines()[-1])
        alone = alone or told["round_s"]
        yield {"run": name, "processes": max(workers, ranks), **told, "speed": alone / told["round_s"]}


def measure(rounds: int, workers: int) -> Row:
    """In processes of its own."""
    with joined(launched()) as group:
        made = federation(*WORDS, f"hardware.workers={workers}", launch=launched(), group=group)
        run = made.loop.rounds()
        next(run)
        seconds = [next(run).seconds["total"] for _ in range(rounds)]
        made.executor.close()
    return {"round_s": median(seconds)}


if __name__ == "__main__":
    if len(sys.argv) > 2:
        answer = measure(int(sys.argv[1]), int(sys.argv[2]))
        if launched().main:
            print(json.dumps(answer))
    else:
        report(rows(repeats(3)))
