"""Tests of the clients' models, each on its client's test set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

import numpy as np
import torch

from fedspa.core.client import Mixture
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.records import Spread
from fedspa.core.transfers import read_together, sent
from fedspa.data.examples import Examples
from fedspa.federated.scores import ClientScores, Kept
from fedspa.metrics.base import Metric
from fedspa.training.base import Engine

RESIDENT_ROWS = 2**24
"""The largest number of test rows of all clients that stay on a GPU: 134 MB."""
Scores = dict[str, np.ndarray]
"""The scores by metric: float64, one for each requested client, in their order."""


@dataclass(frozen=True, eq=False)
class Model:
    """A model that the server can make without a client after a round."""

    kind: str
    """The kind of model: global or personal."""
    state: ClientState = field(default_factory=ClientState)
    """The state of the client whose personal model it is."""


@dataclass(frozen=True, eq=False)
class PredictionBatch:
    """A job: one model predicts one batch.

    The batch is fixed here, so that rounding is the same for any number of processes.
    """

    model: Model
    evaluator: int
    """The index of the evaluator with the examples."""
    rows: torch.Tensor
    """int64 [n], at most a batch, on the device of the examples."""


class Evaluator:
    """Tests models on the clients' rows of one set of examples.

    A model that several clients share predicts each of their examples once. So the global model of a whole federation
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
        """
        Args:
            rows: int64; `rows[k]` are the examples of client k, at least one.
            metrics: they must fit the targets.
            classes: 0 if the targets are numbers.
        """
        self._examples, self.metrics = examples, metrics
        self._rows, self._classes, self._batch_size = rows, classes, batch_size
        self._resident: torch.Tensor | None = None
        if examples.device.type != "cpu" and examples.in_memory:
            of_clients = [self.union([client]) for client in range(len(rows))]
            self._firsts = np.cumsum([0, *map(len, of_clients)])
            if self._firsts[-1] <= RESIDENT_ROWS:
                # Uploaded now, because lanes may read them side by side later.
                self._resident = sent(torch.from_numpy(np.concatenate(of_clients)), examples.device)

    @property
    def of_numbers(self) -> bool:
        """True if the targets are numbers (a regression), not classes."""
        return self._examples.of_numbers

    def images(self, clients: np.ndarray) -> np.ndarray:
        """The number of test examples of each of these clients: int64 [n]."""
        return np.array([len(self._rows[client]) for client in clients], np.int64)

    def batches(self, clients: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """The examples of clients, each once and in order, cut into batches: int64 [n] each, on their device."""
        return self.rows_of(clients).split(self._batch_size)

    def rows_of(self, clients: Sequence[int]) -> torch.Tensor:
        """The examples of clients, each once and in order: int64 [n], on the device of the examples."""
        if self._resident is not None and len(clients) == 1:
            return self._resident[slice(*self._firsts[clients[0] : clients[0] + 2])]
        return sent(torch.from_numpy(self.union(clients)), self._examples.device)

    def predict(self, engine: Engine, model: torch.Tensor | Mixture, rows: torch.Tensor) -> torch.Tensor:
        """A model's [total] predictions for `rows` (int64 [n]): classes, int64 [n], or numbers, float [n, K]."""
        return engine.predict(model, self._examples, rows, self._batch_size)

    def score(self, predictions: Iterable[tuple[Sequence[int], torch.Tensor]]) -> Scores:
        """The scores of the clients of each model, from its predictions for all their `batches`, on the CPU."""
        models, answers = zip(*predictions, strict=True)
        rows = [[self._rows[client] for client in clients] for clients in models]
        firsts = accumulate(map(len, answers), initial=0)
        places = [
            first + np.searchsorted(self.union(clients), np.concatenate(of_model))
            for first, clients, of_model in zip(firsts, models, rows, strict=False)
        ]
        flat = [each for of_model in rows for each in of_model]
        lengths = torch.tensor([len(each) for each in flat])
        there = torch.arange(int(lengths.max())) < lengths[:, None]  # [clients, n]; the rest is padding

        def padded(values: torch.Tensor, padding: float) -> torch.Tensor:
            result = values.new_full((*there.shape, *values.shape[1:]), padding)
            result[there] = values
            return result

        predicted = padded(torch.cat(answers)[torch.from_numpy(np.concatenate(places))], 0)
        targets = self._examples.targets_of(torch.from_numpy(np.concatenate(flat)))
        targets = padded(targets, math.nan if self.of_numbers else -1)
        scores = {name: metric(predicted, targets, self._classes) for name, metric in self.metrics.items()}
        for name, values in scores.items():
            tensor = isinstance(values, torch.Tensor)
            if not tensor or values.shape != lengths.shape or values.is_complex():
                found = f"{values.dtype} {list(values.shape)}" if tensor else type(values).__name__
                raise UserError(
                    f"metric={name} returned {found.removeprefix('torch.')}: it must return one score for each client, "
                    f"here float64 [{len(lengths)}]."
                )
        return {name: values.double().numpy() for name, values in scores.items()}

    def union(self, clients: Sequence[int]) -> np.ndarray:
        """The examples of clients, each once and in order: int64 [n] on the CPU."""
        return np.unique(np.concatenate([self._rows[client] for client in clients]))


def predict_all(
    evaluators: Iterable[Evaluator], engine: Engine, weights: torch.Tensor, clients: Sequence[int]
) -> list[torch.Tensor]:
    """A model's [total] predictions on every set of examples, for all rows of `clients`."""
    return [evaluator.predict(engine, weights, evaluator.rows_of(clients)) for evaluator in evaluators]


def scored(
    evaluators: Iterable[Evaluator], predictions: Iterable[torch.Tensor], clients: Sequence[int]
) -> Scores:
    """The scores of each of `clients`, from the predictions of `predict_all`."""
    scores: Scores = {}
    for evaluator, predicted in zip(evaluators, predictions, strict=True):
        scores |= evaluator.score([(clients, predicted)])
    return scores


def score_models(
    evaluators: Sequence[Evaluator],
    models: Sequence[tuple[Model, Sequence[int]]],
    run: Callable[[Sequence[PredictionBatch]], Iterable[torch.Tensor]],
) -> Kept:
    """The scores by kind of model, on every set of examples.

    Args:
        models: each model with its clients. A client has at most one model of each kind.
        run: runs the jobs, and returns the predictions of each, in their order.
    """
    tests = [
        (model, clients, number, evaluator.batches(clients))
        for model, clients in models
        for number, evaluator in enumerate(evaluators)
    ]
    jobs = [PredictionBatch(model, number, rows) for model, _, number, batches in tests for rows in batches]
    answers = iter(read_together(list(run(jobs))))
    predictions: dict[tuple[str, int], list[tuple[Sequence[int], torch.Tensor]]] = {}
    for model, clients, number, batches in tests:
        predicted = torch.cat(list(islice(answers, len(batches))))
        predictions.setdefault((model.kind, number), []).append((clients, predicted))
    scores: Kept = {}
    for (kind, number), by_model in predictions.items():
        tested = [client for clients, _ in by_model for client in clients]
        for metric, values in evaluators[number].score(by_model).items():
            scores.setdefault(kind, {})[metric] = ClientScores().updated(tested, values)
    return scores


def spreads(evaluators: Sequence[Evaluator], kept: Kept, weighting: str) -> dict[str, dict[str, Spread]]:
    """The statistics of scores over their clients, by kind of model and metric, where some client has a score.

    `weighting`: clients or images, as `eval.weighting`.
    """
    by_metric_name = {metric: evaluator for evaluator in evaluators for metric in evaluator.metrics}

    def spread(metric: str, scores: ClientScores) -> Spread:
        evaluator = by_metric_name[metric]
        return scores.spread(
            None if weighting == "clients" else evaluator.images(scores.clients),
            lower_is_better=not evaluator.metrics[metric].higher_is_better,
        )

    return {
        kind: {
            metric: spread(metric, scores)
            for metric, scores in by_metric.items()
            if not np.isnan(scores.values).all()
        }
        for kind, by_metric in kept.items()
    }
