"""A small run made by hand, for the tests of the trackers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedspa.core import names
from fedspa.core.records import Costs, Event, RoundRecord, Spread
from fedspa.core.tracker import RunInfo, RunResult

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
            "name": "fedspa-dst-s0.5-digits-seed0",
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


def run_result(finetuned: bool = True) -> RunResult:
    accuracy = {"global": spread(34.0), "personal": spread(44.0), "local": spread(51.25, clients=2)}
    if finetuned:
        accuracy["finetuned"] = spread(60.0)
    flat = torch.arange(6, dtype=torch.float32)
    return RunResult(
        summary={
            "method": "fedspa",
            "density_asked": 0.5,
            "metrics": ["accuracy"],
            **{
                names.final(name): value
                for kind, of_kind in accuracy.items()
                for name, value in names.spread_values("accuracy", kind, of_kind).items()
            },
            **{
                f"final/rounds_to_{target}/{kind}": first
                for target, first in ((30, 1), (70, None))
                for kind in ("global", "local")
            },
            "final/density": 0.45,
            "final/density/min": 0.4,
            "final/density/max": 0.5,
            "final/samples_per_s": 1000.0,
            "cost/traffic_bytes": 24500,
            "cost/traffic_dense_bytes": 48000,
            "cost/flops": 1.3733e12,
            "cost/flops_dense": 2e12,
            "time/total_s": 2.0,
        },
        clients={
            "train_size": np.array([3, 3, 2]),
            "val_size": np.array([0, 0, 0]),
            "test_size": np.array([2, 2, 2]),
            "client_updates": np.array([4, 0, 4]),
            "density": np.array([0.5, 1.0, 0.5]),
            "accuracy/global": np.array([1 / 3, 50, 100]),
            "accuracy/personal": np.array([50.0, 50, 50]),
            "accuracy/local": np.array([75, np.nan, 25]),
        },
        weights={"fc.weight": flat[:4].view(2, 2), "fc.bias": flat[4:]},  # views of one vector, as in a run
        masks={"client_0": torch.tensor([0b10110000], dtype=torch.uint8)},
    )
