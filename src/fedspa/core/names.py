"""The names of all measured values: the same in a run's files, tracking stores, tables and reports (docs/files.md).

A name is `group/name`, or `group/name/statistic`. The group of a score is its metric: `accuracy/personal` is the mean
over clients, `accuracy/personal/std` its standard deviation. Costs are the sums over all rounds so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from fedspa.core.records import ACCURACY, KINDS, PHASES, Costs, RoundRecord, Spread

STATISTICS = tuple(f.name for f in fields(Spread))
"""The statistics of a score over the clients: mean, std, p10, worst_decile, min, max, clients."""
OF_A_ROUND = {
    "flops_train": "train_flops",
    "flops_search": "search_flops",
    "traffic_down_bytes": "down_bytes",
    "traffic_up_bytes": "up_bytes",
    "traffic_mask_bytes": "mask_bytes",
    "traffic_encoded_bytes": "encoded_bytes",
}
"""The parts of costs by name, with their fields of `Costs`."""
OF_A_RUN = {"traffic_bytes": "traffic_bytes", "flops": "flops", **OF_A_ROUND}
"""The parts of costs and their sums by name, with their fields of `Costs`."""
TRAFFIC, TRAFFIC_DENSE = "cost/traffic_bytes", "cost/traffic_dense_bytes"
FLOPS, FLOPS_DENSE, FLOPS_FINETUNE = "cost/flops", "cost/flops_dense", "cost/flops_finetune"
TRAFFIC_ENCODED = "cost/traffic_encoded_bytes"
DENSITY = "final/density"
"""The measured density: the mean over the trained clients; with /min and /max their range."""
SAMPLES_PER_S, TOTAL_SECONDS = "final/samples_per_s", "time/total_s"


def score(metric: str, kind: str, statistic: str = "mean") -> str:
    """The name of a score of one kind of model. The mean has no suffix."""
    return f"{metric}/{kind}" if statistic == "mean" else f"{metric}/{kind}/{statistic}"


def spread_values(metric: str, kind: str, spread: Spread) -> dict[str, float]:
    """The statistics of a score by name."""
    return {score(metric, kind, part): value for part, value in asdict(spread).items()}


def train(name: str) -> str:
    """The name of a value of a round's training. The extras of methods have such names too."""
    return f"train/{name}"


def seconds(by_phase: Mapping[str, float]) -> dict[str, float]:
    """Wall-clock seconds of phases, by name."""
    return {f"time/{phase}_s": spent for phase, spent in by_phase.items()}


def faults(events: Mapping[str, int]) -> dict[str, int]:
    """The number of events of each kind, by name."""
    return {f"faults/{kind}": count for kind, count in events.items()}


def final(name: str) -> str:
    """The name of a result at a run's end."""
    return f"final/{name}"


def rounds_to(target: float, kind: str) -> str:
    """The name of the first round in which the mean accuracy reached a target in percent."""
    return final(f"rounds_to_{target:g}/{kind}")


def costs(total: Costs, dense: Costs) -> dict[str, int | None]:
    """The costs of a run so far, and those of dense training, by name."""
    own = {f"cost/{name}": getattr(total, field) for name, field in OF_A_RUN.items()}
    return {**own, FLOPS_DENSE: dense.flops, TRAFFIC_DENSE: dense.traffic_bytes}


def score_columns(kinds: Iterable[str], metrics: Iterable[str]) -> list[str]:
    """The columns of rounds.csv that are empty where a round is not tested."""
    return [score(metric, kind, part) for metric in metrics for kind in kinds for part in STATISTICS]


def round_columns(kinds: Iterable[str], metrics: Iterable[str], extras: Iterable[str]) -> list[str]:
    """The columns of rounds.csv."""
    return [
        "round",
        *score_columns(kinds, metrics),
        *(train(name) for name in ("loss", "learning_rate", "samples", "participants", *extras)),
        *costs(Costs(), Costs()),
        *(f"round_cost/{name}" for name in OF_A_ROUND),
    ]


def round_values(record: RoundRecord) -> dict[str, float | None]:
    """A row of rounds.csv: all values of a round that are the same in each repetition of the run."""
    return {
        "round": record.round,
        **{
            name: value
            for kind, spreads in record.scores.items()
            for metric, spread in spreads.items()
            for name, value in spread_values(metric, kind, spread).items()
        },
        train("loss"): record.loss,
        train("learning_rate"): record.learning_rate,
        train("samples"): record.samples,
        train("participants"): len(record.participants),
        **{train(name): value for name, value in record.extras.items()},
        **costs(record.total_costs, record.dense_costs),
        **{f"round_cost/{name}": getattr(record.costs, field) for name, field in OF_A_ROUND.items()},
    }


def readable(values: Mapping[str, float]) -> dict[str, float]:
    """A round's values for the curves of tracking stores. Costs come in megabytes and GFLOPs too.

    The encoded traffic of a run without a wire format is left out.
    """
    shown = {name: value for name, value in values.items() if value or name != TRAFFIC_ENCODED}
    for name, unit, exact in (("traffic_MB", 1e6, TRAFFIC), ("training_GFLOPs", 1e9, FLOPS)):
        if exact in shown:
            shown[f"cost/{name}"] = shown[exact] / unit
    return shown


def group(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one group, by the rest of their names."""
    return {
        key.removeprefix(f"{name}/"): value for key, value in values.items() if key.startswith(f"{name}/")
    }


def final_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The results of a run from its summary, for the columns of a table of runs."""
    return {final(name): float(value) for name, value in group("final", summary).items() if value is not None}


def final_scores(summary: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """A summary's final scores by metric, accuracy first, and by kind of model: a `Spread` as a dict."""
    return {
        metric: {
            kind: {part: summary[final(score(metric, kind, part))] for part in STATISTICS}
            for kind in KINDS
            if final(score(metric, kind)) in summary
        }
        for metric in summary.get("metrics", [ACCURACY])
    }


def main_metric(summary: Mapping[str, Any]) -> str:
    """The metric of targets, the best checkpoint and tables: accuracy, except in a regression."""
    return str(summary.get("metrics", [ACCURACY])[0])


def is_error(summary: Mapping[str, Any], metric: str) -> bool:
    """True if a lower value of the metric is better."""
    return metric in summary.get("lower_is_better", [])


def unit(summary: Mapping[str, Any]) -> str:
    """The unit of a run's scores with a space before it: percent, or nothing in a regression."""
    return " %" if summary.get("in_percent", True) else ""


def shown(value: float, unit: str, digits: int = 2) -> str:
    """A score without its unit: a percentage with `digits` decimals, another score with four significant digits."""
    return f"{value:.{digits}f}" if unit else f"{value:.4g}"


def timing_columns() -> list[str]:
    """The columns of timing.csv."""
    return ["round", *seconds(dict.fromkeys(PHASES, 0.0))]
