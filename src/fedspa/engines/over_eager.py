"""What the compiled and the stacked engine share: a local step of fixed shape, over an eager engine for all else."""

from __future__ import annotations

import time

import torch

from fedspa.data.batches import Pixels
from fedspa.engines.capture import Captures
from fedspa.engines.choice import Workload
from fedspa.engines.eager import EagerEngine
from fedspa.engines.step import LocalStep
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

    def predict(
        self, weights: torch.Tensor, pixels: Pixels, rows: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        return self._eager.predict(weights, pixels, rows, batch_size)

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._eager.full_gradient(weights, rows)
