"""What the compiled and the stacked engine share: a local step of fixed shape, over an eager engine for all else."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from fedspa.engines.capture import Captures
from fedspa.engines.choice import Workload
from fedspa.engines.eager import EagerEngine
from fedspa.engines.forward import Forward
from fedspa.engines.step import LocalStep
from fedspa.rounds.requests import Predict, TrainingAccuracy
from fedspa.weights import ParameterSpace


class OverEager:
    """Prepares the step, and leaves to the eager engine what concerns one model alone."""

    def __init__(
        self, eager: EagerEngine, workload: Workload, compiler: str | None, lanes: int | None
    ) -> None:
        """
        Args:
            eager: holds the network.
            workload: no batch is larger than the largest client; what it asks for is compiled here.
            compiler: a backend of torch.compile; None runs the same functions uncompiled.
            lanes: clients that a step trains side by side; None trains one, without that dimension.
        """
        self._eager = eager
        begin, captures = time.perf_counter(), Captures(eager.device)
        batch_size = min(eager.settings.batch_size, workload.largest)
        self._step = LocalStep(eager, batch_size, compiler, lanes, captures)
        if workload.gradients:
            _ = self._step.take_gradient  # recorded now, not in the first round
        self._forward = Forward(eager, workload.test_batch, compiler, lanes, captures)
        self.compile_seconds = time.perf_counter() - begin

    @property
    def space(self) -> ParameterSpace:
        return self._eager.space

    @property
    def device(self) -> torch.device:
        return self._eager.device

    @property
    def weights(self) -> torch.Tensor:
        return self._eager.weights

    def _training_accuracies(self, requests: Sequence[TrainingAccuracy]) -> list[float]:
        """The answers to requests, whose predictions go side by side."""
        pixels, size = self._eager.pixels, self._eager.settings.batch_size
        predicted = self._forward.predict(
            [
                Predict(weights=request.weights, pixels=pixels, rows=request.rows, batch_size=size)
                for request in requests
            ]
        )
        return [
            self._eager.accuracy(request, classes)
            for request, classes in zip(requests, predicted, strict=True)
        ]

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._eager.full_gradient(weights, rows)
