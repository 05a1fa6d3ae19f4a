"""Finished runs made by hand, written by the real run folder, for the tests of reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedspa.core import names
from fedspa.core.records import Costs, RoundRecord, Spread
from fedspa.core.tracker import RunInfo, RunResult
from fedspa.tracking.run_folder import RunFolder

LABEL_COUNTS = np.array([[4, 0], [4, 0], [0, 4], [2, 2]])
"""Of the four clients: the first two are alike, the third shares nothing with them, the fourth half with all."""

CLASSES = {
    "fedspa": "FedSpa",
    "fedavg": "FedAvg",
    "subfedavg": "SubFedAvg",
    "lotteryfl": "LotteryFL",
    "local": "Local",
    "ditto": "Ditto",
}

DENSITIES = ("density_asked", "final/density", "final/density/min", "final/density/max")


def make_run(
    folder: Path,
    curves: dict[str, list[float]],
    *,
    method: str = "fedspa",
    mask: str = "dst",
    seed: int = 0,
    sparsity: float = 0.5,
    dataset: str = "digits",
    model: str = "small_cnn",
    partition: dict[str, Any] | None = None,
    clients: int = 4,
    rounds: int | None = None,
    trained: int | None = None,
    traffic: float = 3e6,
    flops: float = 2e9,
    finetune: float = 0,
    masks: dict[str, list[int]] | None = None,
    density: tuple[float, float, float, float] | tuple[()] = (),
    metrics: tuple[str, ...] = ("accuracy",),
    **config: Any,
) -> Path:
    """A run whose `curves` hold an accuracy a round by kind of model; the last is the final one.

    `density`: as asked for, and mean, least and most as measured.
    `metrics`: all of them have the values of `curves`; those other than accuracy are errors.
    `masks` hold a 0 or 1 for each of the eight weights of a network with the tensors `z` (six) and `a` (two).
    """
    partition = partition or {"name": "dirichlet", "gamma": 0.3}
    length = len(next(iter(curves.values())))
    kinds = tuple(curves)
    info = RunInfo(
        folder=folder,
        config={
            "name": folder.name,
            "seed": seed,
            "sparsity": sparsity,
            "method": {"name": method, "_target_": f"fedspa.methods.{method}.{CLASSES.get(method, 'Other')}"},
            "mask": {"name": mask, "_target_": f"fedspa.masks.{mask}.{mask.upper()}"},
            "dataset": {"name": dataset, "train_rows": None},
            "partition": partition,
            "model": {"name": model},
            "eval": {"targets": [70.0, 90.0]},
            **config,
        },
        names={
            "method": method,
            "mask": mask,
            "dataset": dataset,
            "model": model,
            "partition": partition["name"],
        },
        sparsity=sparsity,
        seed=seed,
        rounds=rounds or length,
        config_hash="c0ffee",
        partition_hash="beef",
        version="0.1.0",
        classes=2,
        label_counts=LABEL_COUNTS,
        partition_rows=[np.arange(4) + 4 * client for client in range(4)],
        kinds=kinds,
        metrics=metrics,
    )
    tracker = RunFolder()
    tracker.start(info)
    for round in range(1, length + 1):
        costs = Costs(train_flops=1, down_bytes=1, up_bytes=1)
        tracker.round(
            RoundRecord(
                round=round, participants=(0, 1), learning_rate=0.1, loss=1.0, samples=8, costs=costs,
                total_costs=costs, dense_costs=costs,
                scores={kind: dict.fromkeys(metrics, spread(curves[kind][round - 1])) for kind in kinds},
                extras={}, seconds={"train": 0.4, "search": 0.1 if mask == "dst" else 0.0, "total": 0.6},
            )
        )  # fmt: skip
    final = {kind: spread(values[-1], clients) for kind, values in curves.items()}
    if trained is not None:
        final["local"] = replace(final["local"], clients=trained)
    summary = {
        **info.names,
        "sparsity": sparsity,
        "seed": seed,
        "rounds": info.rounds,
        "clients": clients,
        "metrics": list(metrics),
        "lower_is_better": [metric for metric in metrics if metric != "accuracy"],
        **{
            names.final(name): value
            for kind, of_kind in final.items()
            for metric in metrics
            for name, value in names.spread_values(metric, kind, of_kind).items()
        },
        "cost/traffic_bytes": traffic,
        "cost/traffic_down_bytes": traffic / 2,
        "cost/traffic_up_bytes": traffic / 2,
        "cost/flops": flops,
        "cost/flops_dense": 4e9,
        "cost/flops_finetune": finetune,
        "version": "0.1.0",
        **dict(zip(DENSITIES, density, strict=False)),
    }
    tracker.finish(
        RunResult(
            summary=summary,
            clients={
                "train_size": np.full(4, 4),
                "val_size": np.full(4, 0),
                "test_size": np.full(4, 2),
                "client_updates": np.full(4, 1),
                "density": np.full(4, 0.5),
                **{
                    f"{metric}/{kind}": np.full(4, float(values[-1]))
                    for metric in metrics
                    for kind, values in curves.items()
                },
            },
            weights={"z": torch.zeros(2, 3), "a": torch.zeros(2)},
            masks={client: torch.from_numpy(np.packbits(bits)) for client, bits in (masks or {}).items()},
        )
    )
    return folder


def spread(mean: float, clients: int = 4) -> Spread:
    return Spread(mean=mean, std=0.0, p10=mean, worst_decile=mean, min=mean, max=mean, clients=clients)
