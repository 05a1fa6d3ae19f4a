"""Predictions on tensors that stay in place: the forward pass is compiled, captured and replayed."""

from __future__ import annotations

import torch

from fedspa.data.examples import Examples
from fedspa.training.capture import Captures
from fedspa.training.step import StepFunctions


class Forward:
    """Predicts examples with a model.

    A batch always has the same shape. Examples left from an earlier batch fill it up, which does not change the others.
    """

    def __init__(self, functions: StepFunctions, batch_size: int, captures: Captures) -> None:
        """
        Args:
            functions: has the network.
            batch_size: the number of examples in every batch.
            captures: records the forward pass.
        """
        self._functions, self._eager = functions, functions.eager
        self._layout, train = functions.network.layout, self._eager.examples
        weights, self._statistics = self._layout.halves(self._layout.ordered(self._eager.weights))
        self._weights = weights.to(functions.network.dtype)
        self._inputs = train.empty_inputs(batch_size)
        self._predicted = train.targets.new_zeros(batch_size, *train.targets.shape[1:])
        self._eager.module.eval()
        self._replay = captures(self._run)

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
            for inputs in batch.inputs.split(len(self._inputs)):
                self._inputs[: len(inputs)].copy_(inputs)
                self._replay()
                predicted.append(self._predicted[: len(inputs)].clone())
        return torch.cat(predicted)

    @torch.no_grad()
    def _run(self) -> None:
        found = self._functions.outputs(self._weights, self._statistics, self._inputs)
        self._predicted.copy_(self._eager.module.objective.predictions(found))
