"""Predictions on tensors that stay in place: the forward pass is compiled, captured and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from fedspa.data.examples import Examples
from fedspa.training.capture import Captures
from fedspa.training.step import StepFunctions


class _Batch(NamedTuple):
    """The inputs and predictions of a batch, and the function that computes the latter."""

    inputs: torch.Tensor
    predicted: torch.Tensor
    run: Callable[[], None]


class Forward:
    """Predicts examples with a model.

    Batches have few shapes. Examples left from an earlier batch fill one up, which does not change the others.
    """

    def __init__(self, functions: StepFunctions, batch_sizes: Sequence[int], captures: Captures) -> None:
        """
        Args:
            functions: has the network.
            batch_sizes: the possible numbers of examples in a batch, ascending.
            captures: records the forward pass.
        """
        self._functions, self._eager = functions, functions.eager
        self._layout, train = functions.network.layout, self._eager.examples
        weights, self._statistics = self._layout.halves(self._layout.ordered(self._eager.weights))
        self._weights = weights.to(functions.network.dtype)
        self._eager.module.eval()
        self._batches = []
        for size in batch_sizes:
            inputs = train.empty_inputs(size)
            predicted = train.targets.new_zeros(size, *train.targets.shape[1:])
            run = captures(partial(self._predict, inputs, predicted))
            self._batches.append(_Batch(inputs, predicted, run))

    def predict(
        self, weights: torch.Tensor, examples: Examples, rows: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        """The prediction for each example, [n] or [n, K]; see `Engine.predict`."""
        self._eager.module.eval()
        for target, part in zip(
            (self._weights, self._statistics), self._layout.halves(self._layout.ordered(weights)), strict=True
        ):
            target.copy_(part)
        predicted = []
        for batch in examples.in_order(rows, batch_size):
            for inputs in batch.inputs.split(len(self._batches[-1].inputs)):
                place = next(place for place in self._batches if len(place.inputs) >= len(inputs))
                place.inputs[: len(inputs)].copy_(inputs)
                place.run()
                predicted.append(place.predicted[: len(inputs)].clone())
        return torch.cat(predicted)

    @torch.no_grad()
    def _predict(self, inputs: torch.Tensor, predicted: torch.Tensor) -> None:
        found = self._functions.outputs(self._weights, self._statistics, inputs)
        predicted.copy_(self._eager.module.objective.predictions(found))
