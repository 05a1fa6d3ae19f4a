"""Predictions on tensors that stay where they are: compiled, captured and played back for tests."""

from __future__ import annotations

import torch

from fedspa.data.examples import Examples
from fedspa.training.capture import Captures
from fedspa.training.eager import EagerEngine
from fedspa.training.flat import outputs


class Forward:
    """Shows examples to a model.

    A batch always has the same shape. Examples left over from an earlier batch fill it up: no example looks at another.
    """

    def __init__(self, eager: EagerEngine, batch_size: int, compiler: str | None, captures: Captures) -> None:
        """
        Args:
            eager: holds the network.
            batch_size: examples of every batch.
            compiler: a backend of torch.compile; None runs the same functions uncompiled.
            captures: records the forward pass.
        """
        self._eager, train = eager, eager.examples
        self._weights = eager.weights
        self._inputs = train.empty_inputs(batch_size)
        self._predicted = train.targets.new_zeros(batch_size, *train.targets.shape[1:])
        forward = outputs(eager.module, eager.space)
        self._outputs = (
            forward if compiler is None else torch.compile(forward, backend=compiler, dynamic=False)
        )
        eager.module.eval()
        self._show = captures(self._run)

    def predict(
        self, weights: torch.Tensor, examples: Examples, rows: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        """The prediction for each example, [n] or [n, K]; see `Engine.predict`."""
        self._eager.module.eval()
        self._weights.copy_(weights)
        predicted = []
        for batch in examples.in_order(rows, batch_size):
            for inputs in batch.inputs.split(len(self._inputs)):
                self._inputs[: len(inputs)].copy_(inputs)
                self._show()
                predicted.append(self._predicted[: len(inputs)].clone())
        return torch.cat(predicted)

    @torch.no_grad()
    def _run(self) -> None:
        with self._eager.fabric.autocast():
            found = self._outputs(self._weights, self._inputs)
        self._predicted.copy_(self._eager.module.objective.predictions(found))
