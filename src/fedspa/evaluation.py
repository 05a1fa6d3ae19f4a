"""Testing the models of the clients, each on its client's own test set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from fedspa.data.batches import Pixels
from fedspa.engines.base import Engine
from fedspa.methods.base import ClientState, Method
from fedspa.records import Spread

Metric = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(predicted [K, n], target [K, n], classes) -> percent [K]; int64, rows padded with -1 in the target."""

Scores = dict[str, np.ndarray]
"""By metric: float64, one score in percent a client, in the order of the clients asked for."""


class Evaluator:
    """Tests models on the clients' rows of one set of images.

    A model that several clients share is run once, over the union of their images: the global model of a
    whole federation costs one pass over the test set.
    """

    def __init__(
        self,
        engine: Engine,
        pixels: Pixels,
        rows: Sequence[np.ndarray],
        metrics: Mapping[str, Metric],
        classes: int,
        batch_size: int,
    ) -> None:
        """`rows[k]` int64: the images of client k; each has at least one."""
        self._engine, self._pixels, self._metrics = engine, pixels, metrics
        self._rows, self._classes, self._batch_size = rows, classes, batch_size

    def one(self, weights: torch.Tensor, clients: Sequence[int]) -> Scores:
        """Scores of one model [total] for each of `clients`."""
        return self._score(self._predict(weights, clients), clients)

    def personal(self, method: Method, weights: torch.Tensor, states: Sequence[ClientState]) -> Scores:
        """Scores of every client's personal model; clients that share a state share a model."""
        sharers: dict[int, list[int]] = {}
        for client, state in enumerate(states):
            sharers.setdefault(id(state), []).append(client)
        predicted: dict[int, torch.Tensor] = {}
        for clients in sharers.values():
            model = method.personal(weights, states[clients[0]])
            predicted.update(zip(clients, self._predict(model, clients), strict=True))
        everyone = range(len(states))
        return self._score([predicted[client] for client in everyone], everyone)

    def _predict(self, weights: torch.Tensor, clients: Sequence[int]) -> list[torch.Tensor]:
        """The classes that one model predicts for each client's images, each image looked at once."""
        rows = [self._rows[client] for client in clients]
        union = np.unique(np.concatenate(rows))
        classes = self._engine.predict(weights, self._pixels, torch.from_numpy(union), self._batch_size)
        return [classes[torch.from_numpy(np.searchsorted(union, own)).to(classes.device)] for own in rows]

    def _score(self, predicted: Sequence[torch.Tensor], clients: Sequence[int]) -> Scores:
        labels = self._pixels.labels
        targets = [labels[torch.from_numpy(self._rows[client]).to(labels.device)] for client in clients]
        padded_targets = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-1)
        padded = torch.nn.utils.rnn.pad_sequence(list(predicted), batch_first=True)
        return {
            name: metric(padded, padded_targets, self._classes).double().cpu().numpy()
            for name, metric in self._metrics.items()
        }


def score_one(evaluators: Iterable[Evaluator], weights: torch.Tensor, clients: Sequence[int]) -> Scores:
    """Scores of one model [total] for each of `clients`, on every set of images."""
    return {k: v for evaluator in evaluators for k, v in evaluator.one(weights, clients).items()}


def score_personal(
    evaluators: Iterable[Evaluator], method: Method, weights: torch.Tensor, states: Sequence[ClientState]
) -> Scores:
    """Scores of every client's personal model, on every set of images."""
    return {k: v for evaluator in evaluators for k, v in evaluator.personal(method, weights, states).items()}


def spread(scores: np.ndarray) -> Spread:
    """Unweighted mean over clients, population standard deviation, 10th percentile, and the worst tenth's mean.

    `scores`: float64 [clients], NaN where a client has none (yet); at least one has.
    """
    known = np.sort(scores[~np.isnan(scores)])
    worst = known[: math.ceil(len(known) / 10)]
    return Spread(
        mean=float(known.mean()),
        std=float(known.std()),
        p10=float(np.percentile(known, 10)),
        worst_decile=float(worst.mean()),
        min=float(known[0]),
        max=float(known[-1]),
        clients=len(known),
    )
