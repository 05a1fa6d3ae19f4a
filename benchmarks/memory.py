"""Peak memory of a run on the CPU, by model: `python benchmarks/memory.py`.

Two rounds of FedSpa with DST, 10 clients of one batch each, in a process of its own without workers; beside it the
memory after all imports, before anything is built.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from bench import Row, federation, report

MODELS = {"lenet5": (1, 28, 128), "vgg11": (3, 32, 32), "resnet18": (3, 32, 16)}
"""Channels, side, batch."""
CLIENTS = 10


def rows() -> Iterator[Row]:
    for model in MODELS:
        done = subprocess.run(
            [sys.executable, __file__, model], stdout=subprocess.PIPE, text=True, check=True
        )
        yield json.loads(done.stdout.splitlines()[-1])


def measure(model: str) -> Row:
    """In a process of its own: peak resident memory in MB."""
    import resource

    import fedspa.runs.experiment  # noqa: F401 (what a run imports)

    imports = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    channels, side, batch = MODELS[model]
    made = federation(
        "dataset=synthetic", "partition=iid", "mask=dst", f"model={model}", f"federation.clients={CLIENTS}",
        f"federation.clients_per_round={CLIENTS}", "hardware=cpu", "hardware.workers=1", f"dataset.channels={channels}",
        f"dataset.image_size={side}", f"dataset.train_size={batch * CLIENTS}", "dataset.test_size=200",
        "dataset.client_test_images=1", f"training.batch_size={batch}", "training.epochs=1", "eval.every=1000000",
    )  # fmt: skip
    run = made.loop.rounds()
    next(run), next(run)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"model": model, "imports_MB": imports // 1024, "peak_MB": peak // 1024}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        report(rows())
