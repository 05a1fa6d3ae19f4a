"""Start, rounds and memory by the number of clients: `python benchmarks/many_clients.py [quick | full]`.

Whole runs of FedSpa on images that are made for each client, every run in a process of its own. quick: LeNet5 with
DST among 1,000 to 1,000,000 clients and ResNet18 among 100 and 10,000, 10 and 4 participants a round. full: LeNet5
with 20,000 client updates among 1,000,000 clients, and ResNet18 with 200 among 10,000, its states beyond 50 MB in a
file; with random masks and one image a client, so that it takes a quarter of an hour or so. Prints a JSON line a run:
seconds until the first round, median and all seconds a round, seconds from the last round to the end, and peak memory
in GB of the run's own process and of the largest worker process.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

LENET = ["dataset=synthetic_clients", "dataset.client_train_images=10", "dataset.client_test_images=10"]
RESNET = [*LENET, "model=resnet18", "dataset.channels=3", "dataset.image_size=32", "dataset.classes=100"]
LITTLE = ["mask=rsm", "dataset.client_train_images=1", "eval.every=5"]
"""As little work a client update as can be: its states are as large as any, and what it costs to keep them shows."""
SHORT = ["training.epochs=1", "training.batch_size=10", "logger=none"]


def case(clients: int, rounds: int, participants: int, tested: int, *overrides: str) -> list[str]:
    """The overrides of a run; `participants`: a round; `tested`: clients whose models are tested."""
    sizes = [
        f"federation.clients={clients}",
        f"federation.clients_per_round={participants}",
        f"eval.clients={tested}",
    ]
    return [*SHORT, *overrides, *sizes, f"federation.rounds={rounds}"]


CASES = {
    "quick": [
        *(case(clients, 6, 10, 50, *LENET) for clients in (1_000, 30_000, 1_000_000)),
        *(case(clients, 3, 4, 4, *RESNET) for clients in (100, 10_000)),
    ],
    "full": [
        case(1_000_000, 20, 1000, 100, *LENET, *LITTLE),
        case(10_000, 10, 20, 4, *RESNET, *LITTLE, "hardware.state_memory_gb=0.05"),
    ],
}


class Stopwatch:
    """A tracker that takes note of when the run starts its rounds, of their seconds, and of when they end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def start(self, info: Any) -> None:
        self.started = time.perf_counter()

    def round(self, record: Any) -> None:
        self.seconds.append(record.seconds["total"])
        self.ended = time.perf_counter()

    def finish(self, result: Any) -> None:
        pass

    def abort(self, status: str, reason: str) -> None:
        pass


def measure(overrides: list[str]) -> dict[str, Any]:
    """One run in this process."""
    begin = time.perf_counter()
    from hydra import compose, initialize_config_dir

    from fedspa.config.plan import check
    from fedspa.config.schema import register
    from fedspa.core.paths import config_dir
    from fedspa.runs.experiment import run

    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        plan = check(compose("config", overrides))
    watch = Stopwatch()
    plan.loggers["stopwatch"] = watch
    with tempfile.TemporaryDirectory() as folder:
        summary = run(plan, Path(folder) / "run")
    end = time.perf_counter()
    peak = {
        name: resource.getrusage(who).ru_maxrss / 1e6
        for name, who in (("peak_gb", resource.RUSAGE_SELF), ("worker_gb", resource.RUSAGE_CHILDREN))
    }
    return {
        "model": summary["model"],
        "clients": summary["clients"],
        "took_part": int(summary["final/accuracy/local/clients"]),
        "start_s": round(watch.started - begin, 1),
        "round_s": round(median(watch.seconds), 3),
        "rounds_s": [round(seconds, 3) for seconds in watch.seconds],
        "end_s": round(end - watch.ended, 1),
        **{name: round(value, 2) for name, value in peak.items()},
    }


def main() -> None:
    """Run the cases that are asked for, each in a process of its own, so that its peak memory is its own."""
    word = sys.argv[1] if len(sys.argv) > 1 else "quick"
    if word == "case":
        print("\n" + json.dumps(measure(sys.argv[2:])))
        return
    for overrides in CASES[word]:
        command = [sys.executable, __file__, "case", *overrides]
        shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        print(shown.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
