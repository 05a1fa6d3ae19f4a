"""A round of FedSpa with channel masks against the dense round: `python benchmarks/channels.py [turns] [models]`.

2 clients x 20 steps of 32 made-up images of 32 x 32 in colour, one thread, torch's own operations; the mask search is
part of the round, tests are not. `dst` is the unstructured mask with as many parameters; `sweep=channels` compares
their accuracy. Memory is the peak of a process that builds the federation and takes one round. It takes less than a
quarter of an hour. The exit code is 1 if a round takes a larger share of the dense round's time than its goal.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

from bench import Row, federation, in_turns, repeats, report

GOALS = {
    "lenet5": {"channels, half": 0.72, "channels, quarter": 0.50},
    "vgg11": {"channels, half": 0.70, "channels, quarter": 0.42},
    "resnet18": {"channels, half": 0.70, "channels, quarter": 0.40},
}
"""By model and mask: the largest share of the dense round's time."""
DENSE = ("method=fedavg",)
MASKS = {
    "dense": DENSE,
    "dst, half": ("mask=dst", "sparsity=0.5"),
    "channels, half": ("mask=channels", "sparsity=0.5"),
    "channels, quarter": ("mask=channels", "sparsity=0.75"),
}
FIXED = (
    *("dataset=synthetic", "dataset.channels=3", "dataset.image_size=32", "dataset.classes=10"),
    *("dataset.train_size=1280", "dataset.test_size=40", "dataset.client_test_images=20", "partition=iid"),
    *(
        "federation.clients=2",
        "federation.clients_per_round=2",
        "training.epochs=1",
        "training.batch_size=32",
    ),
    *("eval.every=1000000", "hardware=cpu", "hardware.workers=1", "engine=eager", "engine.kernels=torch"),
)


def rows(model: str, turns: int) -> list[Row]:
    """A row for each kind of mask."""
    begun = {
        name: federation(*FIXED, f"model={model}", *words).loop.rounds() for name, words in MASKS.items()
    }
    traffic = {}

    def seconds(name: str) -> float:
        record = next(begun[name])
        traffic[name] = record.costs.traffic_bytes
        return record.seconds["total"] - record.seconds["evaluate"]

    medians = in_turns(turns, [lambda name=name: seconds(name) for name in MASKS], warm=0)  # type: ignore[misc]
    return [
        {
            "model": model,
            "mask": name,
            "round_s": spent,
            "ratio": spent / medians[0],
            "goal": GOALS[model].get(name),
            "traffic_mb": traffic[name] / 1e6,
            "peak_mb": peak(model, name),
        }
        for name, spent in zip(MASKS, medians, strict=True)
    ]


def peak(model: str, name: str) -> float:
    """The peak memory in MB of another process that takes one round."""
    done = subprocess.run(
        [sys.executable, __file__, "peak", model, name], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    if sys.argv[1:2] == ["peak"]:
        next(federation(*FIXED, f"model={sys.argv[2]}", *MASKS[sys.argv[3]]).loop.rounds())
        status = Path("/proc/self/status").read_text()
        print(int(re.search(r"VmHWM:\s*(\d+)", status)[1]) / 1e3)  # type: ignore[index]
        return
    turns = repeats(3)
    measured = report(row for model in sys.argv[2:] or GOALS for row in rows(model, turns))
    missed = [f"{row['model']} {row['mask']}" for row in measured if row["ratio"] > (row["goal"] or math.inf)]
    if missed:
        sys.exit(f"Slower than the goal: {', '.join(missed)}.")


if __name__ == "__main__":
    main()
