"""summary.json: the page that a run ends with, computed from the tables of its folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from statistics import fmean
from typing import Any

from fedspa.core import names
from fedspa.core.records import KINDS, Costs, Spread
from fedspa.core.tracker import Continued, RunInfo
from fedspa.tracking.tables import Tail, read_table


def summarise(
    info: RunInfo,
    finetuned: Mapping[str, Spread],
    total_seconds: float,
    finetune_flops: int | None = 0,
    densities: Sequence[float] = (),
    clients_keep: Sequence[str] = (),
) -> dict[str, Any]:
    """The summary of a run whose rounds are all in its folder. docs/files.md describes its keys.

    Args:
        finetuned: scores after the final fine-tuning by metric, empty without it.
        finetune_flops: of the final fine-tuning, which the total leaves out.
        densities: measured, of each trained client.
        clients_keep: the names of what trained clients keep beside their masks.
    """
    rounds, timing = (read_table(info.folder / f"{name}.csv") for name in ("rounds", "timing"))
    faults = Counter(row["kind"] for row in Tail(info.folder / "events.csv").rows())
    evaluation = info.config.get("eval", {})
    scores = _final_scores(info, rounds, evaluation.get("final_rounds", 1))
    for metric, spread in finetuned.items():
        scores |= names.spread_values(metric, "finetuned", spread)
    seconds = {name: sum(_known(column)) for name, column in timing.items() if name != "round"}
    costs = {name: (_known(rounds[name][-1:]) or [None])[0] for name in names.costs(Costs(), Costs())}
    return {
        **{part: info.names[part] for part in ("method", "mask", "dataset", "model", "partition")},
        "sparsity": info.sparsity,
        "density_asked": float(1 - Fraction(str(info.sparsity))),
        "seed": info.seed,
        "rounds": info.rounds,
        **{f"continued/{name}": getattr(info.continued, name, None) for name in Continued._fields},
        "clients": info.clients,
        "clients_keep": list(clients_keep),
        **{f"client_tests/{key}": value for key, value in (asdict(info.tests) if info.tests else {}).items()},
        "metrics": list(info.metrics),
        "lower_is_better": list(info.lower_is_better),
        "in_percent": info.in_percent,
        "final_rounds": len(_tested(info, rounds)[-evaluation.get("final_rounds", 1) :]),
        **{
            names.final(names.score(metric, kind, part)): scores[name]
            for metric in info.metrics
            for kind in KINDS
            for part in names.STATISTICS
            if (name := names.score(metric, kind, part)) in scores
        },
        **{
            names.rounds_to(target, kind): _first(info, rounds, kind, target)
            for kind in info.kinds
            if _known(rounds[names.score(info.metrics[0], kind)])
            for target in evaluation.get("targets", ())
        },
        **_densities(densities),
        names.SAMPLES_PER_S: sum(rounds[names.train("samples")]) / seconds[names.TOTAL_SECONDS],
        **costs,
        **({} if info.config["federation"]["wire"] else {names.TRAFFIC_ENCODED: None}),
        names.FLOPS_FINETUNE: finetune_flops,
        **seconds,
        **names.seconds({"compile": info.compile_seconds, "total": total_seconds}),
        **names.faults(faults),
        "engine": info.engine,
        "engine_reason": info.engine_reason,
        "config_hash": info.config_hash,
        "partition_hash": info.partition_hash,
        "data_hash": info.data_hash,
        "data_files": info.data_files,
        "version": info.version,
    }


def _known(values: Sequence[float]) -> list[Any]:
    """Those that are no NaN."""
    return [value for value in values if value == value]


def _tested(info: RunInfo, rounds: Mapping[str, list[Any]]) -> list[int]:
    """The rows of the rounds that tested any kind of model."""
    columns = [rounds[names.score(info.metrics[0], kind)] for kind in info.kinds]
    return [row for row, scores in enumerate(zip(*columns, strict=True)) if _known(scores)]


def _final_scores(info: RunInfo, rounds: Mapping[str, list[Any]], final_rounds: int) -> dict[str, float]:
    """The means over the last tested rounds; the clients are those of the last one."""
    rows = _tested(info, rounds)[-final_rounds:]
    found = {}
    for metric in info.metrics:
        for kind in info.kinds:
            for part in names.STATISTICS:
                name = names.score(metric, kind, part)
                if values := _known([rounds[name][row] for row in rows]):
                    found[name] = int(values[-1]) if part == "clients" else fmean(values)
    return found


def _first(info: RunInfo, rounds: Mapping[str, list[Any]], kind: str, target: float) -> int | None:
    """The first round in which the main metric reached a target; None where it never did."""
    sign = -1 if info.metrics[0] in info.lower_is_better else 1
    scores = zip(rounds["round"], rounds[names.score(info.metrics[0], kind)], strict=True)
    return next((round for round, score in scores if sign * score >= sign * target), None)


def _densities(measured: Sequence[float]) -> dict[str, float]:
    """Mean and extremes over the trained clients, by name; empty where no client was trained."""
    if not measured:
        return {}
    low, high = f"{names.DENSITY}/min", f"{names.DENSITY}/max"
    return {names.DENSITY: fmean(measured), low: min(measured), high: max(measured)}
