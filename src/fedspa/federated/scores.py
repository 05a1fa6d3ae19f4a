"""The scores of clients, stored only for clients that have one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fedspa.core.records import Spread


@dataclass(frozen=True, eq=False)
class ClientScores:
    """A score of some of a federation's clients. It is never changed in place."""

    clients: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64 [n], ascending, without repetition."""
    values: np.ndarray = field(default_factory=lambda: np.empty(0))
    """float64 [n]; NaN for a client without a score in this metric."""

    @classmethod
    def of(cls, clients: torch.Tensor, values: torch.Tensor) -> ClientScores:
        """The scores from the result of `tensors`."""
        return cls(clients.numpy().copy(), values.numpy().copy())

    def tensors(self) -> list[torch.Tensor]:
        """Clients and values, for a checkpoint."""
        return [torch.from_numpy(self.clients), torch.from_numpy(self.values)]

    def updated(self, clients: Sequence[int] | np.ndarray, values: np.ndarray) -> ClientScores:
        """A copy with the scores `values` [n] of `clients`, each once, in place of their earlier ones."""
        new = np.asarray(clients, np.int64)
        stay = np.isin(self.clients, new, invert=True)
        everyone = np.concatenate([self.clients[stay], new])
        order = np.argsort(everyone)
        return ClientScores(everyone[order], np.concatenate([self.values[stay], values])[order])

    def dense(self, count: int) -> np.ndarray:
        """The scores as float64 [count] by client; NaN for a client without one."""
        values = np.full(count, np.nan)
        values[self.clients] = self.values
        return values

    def spread(self, images: np.ndarray | None = None, *, lower_is_better: bool = False) -> Spread:
        """The mean over clients, population standard deviation, 10th percentile, and mean of the worst tenth.

        At least one client must have a score.

        Args:
            images: int64 [n], the test images of each client. Every image then counts alike, with its client's score.
                None: every client counts alike.
            lower_is_better: True for errors; the worst are then the highest.
        """
        has = ~np.isnan(self.values)
        known = np.sort(self.values[has] if images is None else self.values[has].repeat(images[has]))
        tenth = math.ceil(len(known) / 10)
        worst = known[-tenth:] if lower_is_better else known[:tenth]
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
"""The latest scores by kind of model and metric."""


def merged(kept: Kept, found: Kept) -> Kept:
    """`kept` with newer scores. Neither argument is changed."""
    result = {kind: dict(by_metric) for kind, by_metric in kept.items()}
    for kind, by_metric in found.items():
        for metric, scores in by_metric.items():
            scores_now = result.setdefault(kind, {})
            scores_now[metric] = scores_now.get(metric, ClientScores()).updated(scores.clients, scores.values)
    return result
