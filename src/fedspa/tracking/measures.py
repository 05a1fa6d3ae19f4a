"""A run's numbers under the names by which tracking stores show them.

Names are `group/name`: MLflow and TensorBoard draw a section a group (global, personal, local, train, cost, faults,
time, final).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fedspa.core.records import ACCURACY, RoundRecord


def round_metrics(record: RoundRecord) -> dict[str, float]:
    """All that is drawn over the rounds."""
    total, dense = record.total_costs, record.dense_costs
    flops = {
        "train": total.train_flops,
        "search": total.search_flops,
        "total": total.flops,
        "dense": dense.flops,
    }
    return {
        **{
            f"{kind}/{metric}_{statistic}": float(value)
            for kind, spreads in record.scores.items()
            for metric, spread in spreads.items()
            for statistic, value in asdict(spread).items()
        },
        **({} if record.loss is None else {"train/loss": record.loss}),
        "train/learning_rate": record.learning_rate,
        "train/samples": float(record.samples),
        "train/participants": float(len(record.participants)),
        **{f"train/{name}": value for name, value in record.extras.items()},
        "cost/traffic_down_bytes": float(total.down_bytes),
        "cost/traffic_up_bytes": float(total.up_bytes),
        "cost/traffic_masks_bytes": float(total.mask_bytes),
        "cost/traffic_total_bytes": float(total.traffic_bytes),
        **({"cost/traffic_encoded_bytes": float(total.encoded_bytes)} if total.encoded_bytes else {}),
        "cost/traffic_dense_bytes": float(dense.traffic_bytes),
        **{f"cost/flops_{name}": float(count) for name, count in flops.items() if count is not None},
        **{f"faults/{kind}": float(count) for kind, count in record.total_events.items()},
        **{f"time/{phase}_s": seconds for phase, seconds in record.seconds.items()},
    }


def final_scores(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """A summary's final scores by metric, accuracy first, and by kind of model: a `Spread` as a dict, or None."""
    return {ACCURACY: summary["accuracy"], **summary.get("metrics", {})}


def final_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The headline numbers of a run, from its summary: for the columns of a table of runs."""
    metrics = {"final/samples_per_s": float(summary["samples_per_s"])}
    if "mean" in summary["density"]:
        metrics["final/density"] = float(summary["density"]["mean"])
    for metric, by_kind in final_scores(summary).items():
        worst = "worst_decile" if metric == ACCURACY else f"{metric}_worst_decile"
        for kind, spread in by_kind.items():
            if spread:
                metrics[f"final/{kind}_{metric}"] = float(spread["mean"])
                metrics[f"final/{kind}_{worst}"] = float(spread["worst_decile"])
    for kind, rounds in summary["rounds_to_accuracy"].items():
        for target, first in (rounds or {}).items():
            if first is not None:
                metrics[f"final/{kind}_rounds_to_{target}"] = float(first)
    return metrics


def density_text(density: Mapping[str, float]) -> str:
    """The measured density of the visited clients, of a summary: 0.5, or 0.29 to 0.5 where they differ."""
    if "mean" not in density:
        return "none"
    low, high = (f"{density[end]:.4g}" for end in ("min", "max"))
    return low if low == high else f"{low} to {high}"
