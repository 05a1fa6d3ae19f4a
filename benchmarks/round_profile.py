"""Where the time of a round goes: `python benchmarks/round_profile.py [rounds]`.

LeNet5 on made-up EMNIST images, 10 client updates of 5 epochs of 1,248 images a round, and after each round the tests
of every client's global and personal model (eval.every=1). Shares are of the whole round. Training, search and the
tests of local models go on in several workers at once: their seconds are divided by the workers' number.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median

from bench import EMNIST, Row, federation, repeats, report, seconds

from fedspa.core.launch import usable_cores

RUNS = {
    "FedAvg, 10 clients": ("method=fedavg", "federation.clients=10", "dataset.train_size=12480"),
    "FedSpa (DST), 100 clients": ("mask=dst", "federation.clients=100", "dataset.train_size=124800"),
}


def rows(rounds: int) -> Iterator[Row]:
    workers = min(usable_cores(), 10)
    for name, overrides in RUNS.items():
        made = federation(*EMNIST, *overrides, "federation.clients_per_round=10", "eval.every=1000000")
        run, parts = made.loop.rounds(), []
        next(run)
        for _ in range(rounds):
            spent = next(run).seconds
            tests = seconds(partial(made.loop.tests.scores, made.loop.state.draft()))  # as eval.every=1 would
            shared = {phase: spent[phase] / workers for phase in ("train", "search", "evaluate")}
            parts.append((spent["total"] + tests, *shared.values(), spent["aggregate"], tests))
        made.executor.close()
        total, train, search, local, aggregate, tests = (
            median(values) for values in zip(*parts, strict=True)
        )
        yield {
            "run": name,
            "round_s": total,
            "train_%": 100 * train / total,
            "search_%": 100 * search / total,
            "local_tests_%": 100 * local / total,
            "other_tests_%": 100 * tests / total,
            "aggregate_%": 100 * aggregate / total,
        }


if __name__ == "__main__":
    report(rows(repeats(3)))
