"""A small run made by hand, for the tests of the trackers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedspa.core.records import ClientRow, Costs, Event, RoundRecord, RunInfo, RunResult, Spread

COSTS = Costs(train_flops=1e12 / 3, search_flops=1e10, down_bytes=4000, up_bytes=2000, mask_bytes=125)
DENSE = Costs(train_flops=5e11, down_bytes=6000, up_bytes=6000)


def spread(mean: float, clients: int = 3) -> Spread:
    return Spread(
        mean=mean, std=1.5, p10=mean - 2, worst_decile=mean - 3, min=mean - 4, max=mean + 4, clients=clients
    )


def run_info(folder: Path, rounds: int = 4, completed: int = 0, **config: Any) -> RunInfo:
    return RunInfo(
        folder=folder,
        config={
            "name": "digits-fedspa-dst-s0.5-seed0",
            "seed": 0,
            "partition": {"name": "iid", "_target_": "fedspa.partition.iid.Iid"},
            "dataset": {"name": "digits", "mean": [0.1307], "path": None},
            "loggers": {"mlflow": {"name": "mlflow"}},
            **config,
        },
        names={"method": "fedspa", "mask": "dst", "dataset": "digits", "model": "small", "partition": "iid"},
        sparsity=0.5,
        seed=0,
        rounds=rounds,
        config_hash="c0ffee",
        partition_hash="beef",
        version="0.1.0",
        classes=2,
        label_counts=np.array([[2, 1], [0, 3], [1, 1]]),
        partition_rows=[np.array([0, 1, 2]), np.array([3, 4, 5]), np.array([6, 7])],
        kinds=("global", "personal", "local"),
        metrics=("accuracy",),
        extras=("prune_rate",),
        completed=completed,
    )


def times(costs: Costs, rounds: int) -> Costs:
    return Costs(*(rounds * value for value in vars(costs).values()))


def run_record(round: int, evaluated: bool = True) -> RoundRecord:
    scores = {"local": {"accuracy": spread(50 + round / 3, clients=2)}}
    if evaluated:
        scores |= {"global": {"accuracy": spread(30 + round)}, "personal": {"accuracy": spread(40 + round)}}
    return RoundRecord(
        round=round,
        participants=(0, 2),
        learning_rate=0.1 * 0.998 ** (round - 1),
        loss=1 / round,
        samples=500,
        costs=COSTS,
        total_costs=times(COSTS, round),
        dense_costs=times(DENSE, round),
        scores=scores,
        extras={"prune_rate": 0.5},
        seconds={"train": 0.4, "total": 0.5},
    )


def faulty_records() -> list[RoundRecord]:
    """Three rounds: two clients drop out, one more and one is late, and of the third nothing is left."""
    first, second, third = (run_record(round) for round in (1, 2, 3))

    def event(round: int, client: int | None, kind: str) -> Event:
        return Event(round, client, kind, "skipped", f"Client {client} in round {round}: {kind}.")

    return [
        replace(first, events=(event(1, 0, "dropout"), event(1, 2, "dropout")), total_events={"dropout": 2}),
        replace(
            second,
            events=(event(2, 0, "late"), event(2, 2, "dropout")),
            total_events={"dropout": 3, "late": 1},
        ),
        replace(
            third,
            loss=None,
            samples=0,
            scores={},
            events=(event(3, None, "empty_round"),),
            total_events={"dropout": 3, "late": 1, "empty_round": 1},
        ),
    ]


def accuracies(*scores: float | None) -> dict[str, float | None]:
    """Of the global, personal and local model of a client."""
    return dict(zip(("global_accuracy", "personal_accuracy", "local_accuracy"), scores, strict=True))


def run_result(finetuned: bool = True) -> RunResult:
    accuracy = {
        "global": vars(spread(34.0)),
        "personal": vars(spread(44.0)),
        "local": vars(spread(51.25, clients=2)),
        "finetuned": vars(spread(60.0)) if finetuned else None,
    }
    flat = torch.arange(6, dtype=torch.float32)
    return RunResult(
        summary={
            "method": "fedspa",
            "density": {"asked": 0.5, "mean": 0.45, "min": 0.4, "max": 0.5},
            "accuracy": accuracy,
            "rounds_to_accuracy": {"global": {"30": 1, "70": None}, "local": {"30": 1, "70": None}},
            "traffic_bytes": {"down": 16000, "up": 8000, "masks": 500, "total": 24500, "dense_total": 48000},
            "flops": {"train": 4e12 / 3, "search": 4e10, "total": 1.3733e12, "dense_total": 2e12},
            "seconds": {"train": 1.6, "search": 0.0, "evaluate": 0.0, "aggregate": 0.0, "total": 2.0},
            "events": {},
            "samples_per_s": 1000.0,
        },
        clients=[
            ClientRow(0, 3, 0, 2, 4, 0.5, accuracies(1 / 3, 50.0, 75.0)),
            ClientRow(1, 3, 0, 2, 0, 1.0, accuracies(50.0, 50.0, None)),
            ClientRow(2, 2, 0, 2, 4, 0.5, accuracies(100.0, 50.0, 25.0)),
        ],
        weights={"fc.weight": flat[:4].view(2, 2), "fc.bias": flat[4:]},  # views of one vector, as in a run
        masks={"client_0": torch.tensor([0b10110000], dtype=torch.uint8)},
    )
