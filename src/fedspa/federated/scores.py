"""The scores of those clients that have one: kept without a place for each of very many others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedspa.core.records import Spread
from fedspa.core.saved import Saved


@dataclass(frozen=True, eq=False)
class ClientScores:
    """A score of some of a federation's clients. Never written into."""

    clients: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64 [n], ascending, each once."""
    values: np.ndarray = field(default_factory=lambda: np.empty(0))
    """float64 [n]; NaN where a metric says that there is none."""

    def updated(self, clients: Sequence[int] | np.ndarray, values: np.ndarray) -> ClientScores:
        """With the scores `values` [n] of `clients`, each once, in place of what they had."""
        own = np.asarray(clients, np.int64)
        stay = np.isin(self.clients, own, invert=True)
        everyone = np.concatenate([self.clients[stay], own])
        order = np.argsort(everyone)
        return ClientScores(everyone[order], np.concatenate([self.values[stay], values])[order])

    def dense(self, count: int) -> np.ndarray:
        """float64 [count]: by client, NaN where one has none."""
        values = np.full(count, np.nan)
        values[self.clients] = self.values
        return values

    def spread(self, images: np.ndarray | None = None) -> Spread:
        """Mean over clients, population standard deviation, 10th percentile, the worst tenth's mean.

        At least one client has a score. Every client counts alike; with `images` int64 [n], those that each of the
        clients was tested on, every image does, as if it had its client's score.
        """
        has = ~np.isnan(self.values)
        known = np.sort(self.values[has] if images is None else self.values[has].repeat(images[has]))
        worst = known[: math.ceil(len(known) / 10)]
        return Spread(
            mean=float(known.mean()),
            std=float(known.std()),
            p10=float(np.percentile(known, 10)),
            worst_decile=float(worst.mean()),
            min=float(known[0]),
            max=float(known[-1]),
            clients=int(has.sum()),
        )


Kept = dict[str, dict[str, ClientScores]]
"""By kind of model and metric."""


def merged(kept: Kept, found: Kept) -> Kept:
    """`kept` with what was found since, neither of them written into."""
    result = {kind: dict(by_metric) for kind, by_metric in kept.items()}
    for kind, by_metric in found.items():
        for metric, scores in by_metric.items():
            own = result.setdefault(kind, {})
            own[metric] = own.get(metric, ClientScores()).updated(scores.clients, scores.values)
    return result


def saved_scores(saved: Saved, count: int, kinds: Iterable[str], metrics: Iterable[str]) -> Kept:
    """The scores in a checkpoint, of `count` clients: of some kinds, by all metrics. Raises `Misfit`."""
    kept: Kept = {}
    for kind, by_metric in saved.items():
        by_metric.mapping(metrics)
        kept[kind.text(kinds)] = {name: _saved(by_metric[name], count) for name in metrics}
    return kept


def _saved(saved: Saved, count: int) -> ClientScores:
    whose, scores = saved.sequence(2)
    clients = whose.array("int64")
    values = scores.array("float64", len(clients))
    if not len(clients) or clients[0] < 0 or clients[-1] >= count or (np.diff(clients) <= 0).any():
        raise whose.misfit(f"some of the clients 0 to {count - 1} in their order", "others")
    if np.isinf(values).any() or np.isnan(values).all():
        raise scores.misfit("finite, or NaN for some", "infinite, or NaN for all")
    return ClientScores(clients, values)
