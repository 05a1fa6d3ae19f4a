"""The one page that a run ends with: summary.json, and the accuracies that it is made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from statistics import fmean
from typing import Any

from fedspa.core.records import (
    ACCURACY,
    KINDS,
    PHASES,
    Costs,
    RoundRecord,
    RunInfo,
    Spread,
    saved_costs,
    saved_spread,
)
from fedspa.core.saved import Saved


def mean_spread(spreads: Sequence[Spread]) -> Spread:
    """The field-wise mean over rounds; the clients are those of the last one."""

    def mean(name: str) -> float:
        return fmean(getattr(spread, name) for spread in spreads)

    return Spread(
        mean=mean("mean"),
        std=mean("std"),
        p10=mean("p10"),
        worst_decile=mean("worst_decile"),
        min=mean("min"),
        max=mean("max"),
        clients=spreads[-1].clients,
    )


class History:
    """Gathers from the rounds what the summary needs."""

    def __init__(
        self, targets: Sequence[float], final_rounds: int, metrics: Sequence[str] = (ACCURACY,)
    ) -> None:
        """`targets`: accuracies in percent; `final_rounds`: how many last tested rounds make the final scores."""
        self._targets, self._metrics = tuple(targets), tuple(metrics)
        self._final: deque[dict[str, dict[str, Spread]]] = deque(maxlen=final_rounds)
        self._reached: dict[str, dict[float, int | None]] = {}
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._samples = 0
        self._costs = self._dense_costs = Costs()
        self._events: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "final": [
                {
                    kind: {metric: asdict(s) for metric, s in spreads.items()}
                    for kind, spreads in tested.items()
                }
                for tested in self._final
            ],
            "reached": {kind: dict(reached) for kind, reached in self._reached.items()},
            "seconds": dict(self._seconds),
            "samples": self._samples,
            "costs": asdict(self._costs),
            "dense_costs": asdict(self._dense_costs),
            "events": dict(self._events),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `Misfit` for what cannot be of this run; nothing has changed then."""
        saved = Saved(state, "history")
        final = [
            {kind.text(KINDS): self._saved_spreads(spreads) for kind, spreads in tested.items()}
            for tested in saved["final"].sequence(most=self._final.maxlen or 0)
        ]
        reached = {kind.text(KINDS): self._saved_reached(rounds) for kind, rounds in saved["reached"].items()}
        saved["seconds"].mapping(PHASES)
        seconds = {phase: saved["seconds"][phase].number(0) for phase in PHASES}
        samples = saved["samples"].integer()
        costs, dense_costs = saved_costs(saved["costs"]), saved_costs(saved["dense_costs"])
        events = {kind.text(): number.integer(1) for kind, number in saved["events"].items()}
        self._final.clear()
        self._final.extend(final)
        self._reached, self._seconds, self._samples, self._events = reached, seconds, samples, events
        self._costs, self._dense_costs = costs, dense_costs

    def _saved_spreads(self, saved: Saved) -> dict[str, Spread]:
        """Of one kind of model in one round, by metric."""
        saved.mapping(self._metrics)
        return {metric: saved_spread(saved[metric]) for metric in self._metrics}

    def _saved_reached(self, saved: Saved) -> dict[float, int | None]:
        """The round in which each target was reached."""
        reached: dict[float, int | None] = {}
        for target, round in saved.items():
            if target.number() not in self._targets:
                raise target.misfit(f"one of eval.targets={list(self._targets)}")
            reached[target.number()] = round.integer(1) if round.optional() else None
        if len(reached) != len(set(self._targets)):
            raise saved.misfit(f"the round of each of eval.targets={list(self._targets)}")
        return reached

    def add(self, record: RoundRecord) -> None:
        """Take note of one round."""
        self._costs, self._dense_costs = record.total_costs, record.dense_costs
        self._events = dict(record.total_events)
        self._samples += record.samples
        for phase, seconds in record.seconds.items():
            self._seconds[phase] += seconds
        if not record.scores:
            return
        self._final.append({kind: dict(by_metric) for kind, by_metric in record.scores.items()})
        for kind, by_metric in record.scores.items():
            reached = self._reached.setdefault(kind, dict.fromkeys(self._targets))
            for target, round in reached.items():
                if round is None and by_metric[ACCURACY].mean >= target:
                    reached[target] = record.round

    def _final_scores(self, metric: str, finetuned: Mapping[str, Spread]) -> dict[str, dict[str, Any] | None]:
        """By kind of model: the mean over the last tested rounds, None where there is no such model."""
        final: dict[str, dict[str, Any] | None] = dict.fromkeys(KINDS)
        for kind in KINDS:
            if spreads := [tested[kind][metric] for tested in self._final if kind in tested]:
                final[kind] = asdict(mean_spread(spreads))
        if metric in finetuned:
            final["finetuned"] = asdict(finetuned[metric])
        return final

    def summary(
        self,
        info: RunInfo,
        finetuned: Mapping[str, Spread],
        total_seconds: float,
        finetune_flops: int | None = 0,
        densities: Sequence[float] = (),
    ) -> dict[str, Any]:
        """The summary of a finished run; scores in percent, traffic in bytes, by kind of model.

        Args:
            finetuned: scores after the final fine-tuning by metric, empty without it.
            finetune_flops: of the final fine-tuning, which the total leaves out.
            densities: measured, of each visited client.
        """
        costs, dense = self._costs, self._dense_costs
        scores = {metric: self._final_scores(metric, finetuned) for metric in self._metrics}
        return {
            **{part: info.names[part] for part in ("method", "mask", "dataset", "model", "partition")},
            "sparsity": info.sparsity,
            "density": {
                "asked": float(1 - Fraction(str(info.sparsity))),
                **(
                    {"mean": fmean(densities), "min": min(densities), "max": max(densities)}
                    if densities
                    else {}
                ),
            },
            "seed": info.seed,
            "rounds": info.rounds,
            "clients": info.clients,
            "client_tests": asdict(info.tests) if info.tests else None,
            "accuracy": scores.pop(ACCURACY),
            "metrics": scores,
            "final_rounds": len(self._final),
            "rounds_to_accuracy": {
                kind: {f"{target:g}": round for target, round in reached.items()}
                for kind, reached in self._reached.items()
            },
            "traffic_bytes": {
                "down": costs.down_bytes,
                "up": costs.up_bytes,
                "masks": costs.mask_bytes,
                "total": costs.traffic_bytes,
                "encoded": costs.encoded_bytes if info.config["federation"]["wire"] else None,
                "dense_total": dense.traffic_bytes,
            },
            "flops": {
                "train": costs.train_flops,
                "search": costs.search_flops,
                "total": costs.flops,
                "dense_total": dense.flops,
                "finetune": finetune_flops,
            },
            "engine": info.engine,
            "engine_reason": info.engine_reason,
            "seconds": {**self._seconds, "compile": info.compile_seconds, "total": total_seconds},
            "events": dict(self._events),
            "samples_per_s": self._samples / self._seconds["total"],
            "config_hash": info.config_hash,
            "partition_hash": info.partition_hash,
            "data_hash": info.data_hash,
            "data_files": info.data_files,
            "version": info.version,
        }
