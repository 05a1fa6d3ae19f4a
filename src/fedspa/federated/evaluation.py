"""Testing the models of the clients, each on its client's own test set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.records import Spread
from fedspa.data.examples import Examples
from fedspa.federated.client_states import Held
from fedspa.federated.scores import ClientScores, Kept
from fedspa.metrics.base import Metric
from fedspa.training.base import Engine

Scores = dict[str, np.ndarray]
"""By metric: float64, one score a client, in the order of the clients asked for."""


@dataclass(frozen=True, eq=False)
class Model:
    """A model that the server can make by itself after a round."""

    kind: str
    """global, or personal."""
    state: Held = field(default_factory=ClientState)
    """Of the client whose personal model it is; read from the file only when the model is made."""


@dataclass(frozen=True, eq=False)
class PredictionBatch:
    """A job: a model makes its predictions for one batch. What it sees is fixed here, and not by who does the job, so
    that rounding is the same however many processes share the tests."""

    model: Model
    evaluator: int
    """Which of the evaluators holds the examples."""
    rows: np.ndarray
    """int64 [n], at most a batch."""


class Evaluator:
    """Tests models on the clients' rows of one set of examples.

    A model that several clients share sees each of their examples once: the global model of a whole federation
    costs one pass over the test set.
    """

    def __init__(
        self,
        examples: Examples,
        rows: Sequence[np.ndarray],
        metrics: Mapping[str, Metric],
        classes: int,
        batch_size: int,
    ) -> None:
        """`rows[k]` int64: the examples of client k; each has at least one. `classes`: 0 where targets are numbers.

        Raises `UserError` for a metric that does not fit the targets.
        """
        for name, metric in metrics.items():
            if metric.of_numbers != examples.of_numbers:
                kinds = ("classes", "numbers")
                raise UserError(
                    f"metric={name} compares {kinds[metric.of_numbers]}, but the targets of this data set are "
                    f"{kinds[examples.of_numbers]}: use another metric."
                )
        self._examples, self.metrics = examples, metrics
        self._rows, self._classes, self._batch_size = rows, classes, batch_size

    def images(self, clients: np.ndarray) -> np.ndarray:
        """How many examples each of these clients is tested on: int64 [n]."""
        return np.array([len(self._rows[client]) for client in clients], np.int64)

    def batches(self, clients: Sequence[int]) -> list[np.ndarray]:
        """The examples of clients, each once and in order, cut into batches: int64 [n] each."""
        union = self.union(clients)
        return np.split(union, range(self._batch_size, len(union), self._batch_size))

    def predict(self, engine: Engine, weights: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """What a model [total] predicts for `rows` (int64 [n]): classes, int64 [n], or numbers, float [n, K]."""
        return engine.predict(weights, self._examples, torch.from_numpy(rows), self._batch_size)

    def score(self, predictions: Iterable[tuple[Sequence[int], torch.Tensor]]) -> Scores:
        """Scores of the clients of each model, from what it predicts for all their `batches`.

        They are taken on the CPU: of few numbers in many small pieces. All predictions come there at once.
        """
        models, answers = zip(*predictions, strict=True)
        come = torch.cat(answers).cpu().split([len(answer) for answer in answers])
        predicted, targets = [], []
        for clients, answer in zip(models, come, strict=True):
            union = self.union(clients)
            for client in clients:
                own = self._rows[client]
                predicted.append(answer[torch.from_numpy(np.searchsorted(union, own))])
                targets.append(self._examples.targets_of(torch.from_numpy(own)))
        missing = math.nan if self._examples.of_numbers else -1
        padded_targets = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=missing)
        padded = torch.nn.utils.rnn.pad_sequence(predicted, batch_first=True)
        return {
            name: metric(padded, padded_targets, self._classes).double().numpy()
            for name, metric in self.metrics.items()
        }

    def union(self, clients: Sequence[int]) -> np.ndarray:
        """The examples of clients, each once and in order: int64 [n]."""
        return np.unique(np.concatenate([self._rows[client] for client in clients]))


def score_one(
    evaluators: Iterable[Evaluator], engine: Engine, weights: torch.Tensor, clients: Sequence[int]
) -> Scores:
    """Scores of one model [total] for each of `clients`, on every set of examples."""
    scores: Scores = {}
    for evaluator in evaluators:
        predicted = evaluator.predict(engine, weights, evaluator.union(clients))
        scores |= evaluator.score([(clients, predicted)])
    return scores


def score_models(
    evaluators: Sequence[Evaluator],
    models: Sequence[tuple[Model, Sequence[int]]],
    run: Callable[[Sequence[PredictionBatch]], Iterable[torch.Tensor]],
) -> Kept:
    """Scores by kind of model, on every set of examples.

    Args:
        models: each with the clients that it is a model of; of a kind, a client has at most one.
        run: has the jobs done and gives the predictions of each, in their order.
    """
    tests = [
        (model, clients, number, evaluator.batches(clients))
        for model, clients in models
        for number, evaluator in enumerate(evaluators)
    ]
    jobs = [PredictionBatch(model, number, rows) for model, _, number, batches in tests for rows in batches]
    answers = iter(run(jobs))
    predictions: dict[tuple[str, int], list[tuple[Sequence[int], torch.Tensor]]] = {}
    for model, clients, number, batches in tests:
        predicted = torch.cat(list(islice(answers, len(batches))))
        predictions.setdefault((model.kind, number), []).append((clients, predicted))
    scores: Kept = {}
    for (kind, number), by_model in predictions.items():
        whose = [client for clients, _ in by_model for client in clients]
        for metric, values in evaluators[number].score(by_model).items():
            scores.setdefault(kind, {})[metric] = ClientScores().updated(whose, values)
    return scores


def spreads(evaluators: Sequence[Evaluator], kept: Kept, weighting: str) -> dict[str, dict[str, Spread]]:
    """How scores are spread over their clients, by kind of model and metric.

    `weighting`: as `eval.weighting`, clients or images.
    """
    holders = {metric: evaluator for evaluator in evaluators for metric in evaluator.metrics}

    def spread(metric: str, scores: ClientScores) -> Spread:
        return scores.spread(None if weighting == "clients" else holders[metric].images(scores.clients))

    return {
        kind: {metric: spread(metric, scores) for metric, scores in by_metric.items()}
        for kind, by_metric in kept.items()
    }
