"""Testing the models of the clients, each on its client's own test set."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from fedspa.client_state import ClientState
from fedspa.data.batches import Pixels
from fedspa.records import Spread
from fedspa.rounds.client_states import Held
from fedspa.rounds.requests import Predict
from fedspa.rounds.scores import ClientScores, Kept

Metric = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(predicted [K, n], target [K, n], classes) -> percent [K]; int64, rows padded with -1 in the target."""

Scores = dict[str, np.ndarray]
"""By metric: float64, one score in percent a client, in the order of the clients asked for."""


@dataclass(frozen=True, eq=False)
class Model:
    """A model that the server can make by itself after a round."""

    kind: str
    """global, or personal."""
    state: Held = field(default_factory=ClientState)
    """Of the client whose personal model it is; read from the file only when the model is made."""


@dataclass(frozen=True, eq=False)
class PredictionBatch:
    """A job: a model predicts the classes of one batch of images. What it sees is fixed here, and not by who does
    the job, so that rounding is the same however many processes share the tests."""

    model: Model
    evaluator: int
    """Which of the evaluators holds the images."""
    rows: np.ndarray
    """int64 [n], at most a batch."""


class Evaluator:
    """Tests models on the clients' rows of one set of images.

    A model that several clients share sees each of their images once: the global model of a whole federation
    costs one pass over the test set.
    """

    def __init__(
        self,
        pixels: Pixels,
        rows: Sequence[np.ndarray],
        metrics: Mapping[str, Metric],
        classes: int,
        batch_size: int,
    ) -> None:
        """`rows[k]` int64: the images of client k; each has at least one."""
        self._pixels, self.metrics = pixels, metrics
        self._rows, self._classes, self._batch_size = rows, classes, batch_size

    def images(self, clients: np.ndarray) -> np.ndarray:
        """How many images each of these clients is tested on: int64 [n]."""
        return np.array([len(self._rows[client]) for client in clients], np.int64)

    def batches(self, clients: Sequence[int]) -> list[np.ndarray]:
        """The images of clients, each once and in order, cut into batches: int64 [n] each."""
        union = self.union(clients)
        return np.split(union, range(self._batch_size, len(union), self._batch_size))

    def request(self, weights: torch.Tensor, rows: np.ndarray) -> Predict:
        """Asks for the classes that a model [total] predicts for the images of `rows` (int64 [n])."""
        batch_size = self._batch_size
        return Predict(
            weights=weights, pixels=self._pixels, rows=torch.from_numpy(rows), batch_size=batch_size
        )

    def score(self, predictions: Iterable[tuple[Sequence[int], torch.Tensor]]) -> Scores:
        """Scores of the clients of each model, from what it predicts for all their `batches` (int64 [n]).

        They are taken on the CPU: of few numbers in many small pieces. All predictions come there at once.
        """
        models, answers = zip(*predictions, strict=True)
        come = torch.cat(answers).cpu().split([len(classes) for classes in answers])
        predicted, targets = [], []
        for clients, classes in zip(models, come, strict=True):
            union = self.union(clients)
            for client in clients:
                own = self._rows[client]
                predicted.append(classes[torch.from_numpy(np.searchsorted(union, own))])
                targets.append(self._pixels.labels_of(torch.from_numpy(own)))
        padded_targets = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-1)
        padded = torch.nn.utils.rnn.pad_sequence(predicted, batch_first=True)
        return {
            name: metric(padded, padded_targets, self._classes).double().numpy()
            for name, metric in self.metrics.items()
        }

    def union(self, clients: Sequence[int]) -> np.ndarray:
        """The images of clients, each once and in order: int64 [n]."""
        return np.unique(np.concatenate([self._rows[client] for client in clients]))


def score_one(
    evaluators: Iterable[Evaluator], weights: torch.Tensor, clients: Sequence[int]
) -> Generator[Predict, torch.Tensor, Scores]:
    """Scores of one model [total] for each of `clients`, on every set of images; asks for what it predicts."""
    scores: Scores = {}
    for evaluator in evaluators:
        classes = yield evaluator.request(weights, evaluator.union(clients))
        scores |= evaluator.score([(clients, classes)])
    return scores


def score_models(
    evaluators: Sequence[Evaluator],
    models: Sequence[tuple[Model, Sequence[int]]],
    run: Callable[[Sequence[PredictionBatch]], Iterable[torch.Tensor]],
) -> Kept:
    """Scores by kind of model, on every set of images.

    Args:
        models: each with the clients that it is a model of; of a kind, a client has at most one.
        run: has the jobs done and gives the classes (int64 [n]) that each predicts, in their order.
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
        classes = torch.cat(list(islice(answers, len(batches))))
        predictions.setdefault((model.kind, number), []).append((clients, classes))
    scores: Kept = {}
    for (kind, number), by_model in predictions.items():
        whose = [client for clients, _ in by_model for client in clients]
        for metric, values in evaluators[number].score(by_model).items():
            scores.setdefault(kind, {})[metric] = ClientScores().updated(whose, values)
    return scores


def spread(evaluators: Sequence[Evaluator], metric: str, scores: ClientScores, weighting: str) -> Spread:
    """How scores by a metric are spread over their clients. weighting: as `eval.weighting`, clients or images."""
    if weighting == "clients":
        return scores.spread()
    (evaluator,) = (evaluator for evaluator in evaluators if metric in evaluator.metrics)
    return scores.spread(evaluator.images(scores.clients))
