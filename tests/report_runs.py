"""Finished runs made by hand, written by the real run folder, for the tests of reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedspa.core.records import ClientRow, Costs, RoundRecord, RunInfo, RunResult, Spread
from fedspa.tracking.run_folder import RunFolder

LABEL_COUNTS = np.array([[4, 0], [4, 0], [0, 4], [2, 2]])
"""Of the four clients: the first two are alike, the third shares nothing with them, the fourth half with all."""


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
    visited: int | None = None,
    traffic: float = 3e6,
    flops: float = 2e9,
    finetune: float = 0,
    masks: dict[str, list[int]] | None = None,
    density: dict[str, float] | None = None,
    **config: Any,
) -> Path:
    """A run whose `curves` hold an accuracy a round by kind of model; the last is the final one.

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
            "method": {"name": method},
            "mask": {"name": mask},
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
        metrics=("accuracy",),
    )
    tracker = RunFolder()
    tracker.start(info)
    for round in range(1, length + 1):
        costs = Costs(train_flops=1, down_bytes=1, up_bytes=1)
        tracker.round(
            RoundRecord(
                round=round, participants=(0, 1), learning_rate=0.1, loss=1.0, samples=8, costs=costs,
                total_costs=costs, dense_costs=costs,
                scores={kind: {"accuracy": spread(curves[kind][round - 1])} for kind in kinds},
                extras={}, seconds={"train": 0.4, "search": 0.1 if mask == "dst" else 0.0, "total": 0.6},
            )
        )  # fmt: skip
    accuracy: dict[str, Any] = dict.fromkeys(("global", "personal", "local", "finetuned"))
    accuracy |= {kind: vars(spread(values[-1], clients)) for kind, values in curves.items()}
    if visited is not None:
        accuracy["local"]["clients"] = visited
    summary = {
        **info.names,
        "sparsity": sparsity,
        "seed": seed,
        "rounds": info.rounds,
        "clients": clients,
        "accuracy": accuracy,
        "traffic_bytes": {"down": traffic / 2, "up": traffic / 2, "masks": 0, "total": traffic},
        "flops": {"train": flops, "search": 0, "total": flops, "dense_total": 4e9, "finetune": finetune},
        "version": "0.1.0",
        **({"density": density} if density else {}),
    }
    tracker.finish(
        RunResult(
            summary=summary,
            clients=[
                ClientRow(
                    client,
                    4,
                    0,
                    2,
                    1,
                    0.5,
                    {f"{kind}_accuracy": values[-1] for kind, values in curves.items()},
                )
                for client in range(4)
            ],
            weights={"z": torch.zeros(2, 3), "a": torch.zeros(2)},
            masks={client: torch.from_numpy(np.packbits(bits)) for client, bits in (masks or {}).items()},
        )
    )
    return folder


def spread(mean: float, clients: int = 4) -> Spread:
    return Spread(mean=mean, std=0.0, p10=mean, worst_decile=mean, min=mean, max=mean, clients=clients)
