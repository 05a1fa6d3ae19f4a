"""The compiled engine: one local step, compiled once for one shape, serves every client and round.

On CUDA the whole step (gather and augment the batch, forward, backward, clip, mask, update, proximal term) is also
recorded as a CUDA graph, so that it costs one launch.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch

from fedspa.core.client import Trained
from fedspa.core.randomness import seed_layers
from fedspa.core.weights import ParameterSpace
from fedspa.data.examples import Examples
from fedspa.training.base import LocalTask
from fedspa.training.capture import Captures
from fedspa.training.compiling import compiling_afresh
from fedspa.training.eager import EagerEngine
from fedspa.training.flat import first_batch, plan_batches
from fedspa.training.forward import Forward
from fedspa.training.step import LocalStep, sent
from fedspa.training.workload import Workload


class CompiledEngine:
    """Draws each client's batches as the eager engine does, and takes its steps; only sums differ, by rounding.

    Layers that draw random numbers, such as dropout, draw from the same seed by the compiler's own generator: runs
    repeat, but their draws are not the eager engine's.
    """

    name = "compiled"
    forks = False

    def __init__(self, eager: EagerEngine, workload: Workload, compiler: str | None) -> None:
        """
        Args:
            eager: holds the network, and computes what a run asks for once.
            workload: no batch is larger than the largest client; what the workload asks for is compiled here.
            compiler: a backend of torch.compile; None runs the same functions uncompiled.
        """
        self._eager = eager
        self.instead_of: dict[str, str] = {}
        begin, captures = time.perf_counter(), Captures(eager.device)
        batch_size = min(eager.settings.batch_size, workload.largest)
        with compiling_afresh() if compiler else nullcontext():
            self._step = LocalStep(eager, batch_size, compiler, captures)
            if workload.gradients:
                _ = self._step.take_gradient  # recorded now, not in the first round
            self._forward = Forward(eager, workload.test_batch, compiler, captures)
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

    def train(self, task: LocalTask) -> Trained:
        """Train a client. Nothing waits for the device."""
        step, settings = self._step, self._eager.settings
        plan = plan_batches(self._eager.examples, task, settings)
        counts = (plan[:, :, 0] >= 0).sum(1).tolist()
        samples = sum(counts)
        self._prepare(task.generator)
        step.start(task)
        for part, count in zip(sent(plan[:, : step.batch_size], self.device), counts, strict=True):
            if count < len(part) and self.space.statistics:
                # What fills a batch up would count in BatchNorm's averages.
                step.take_partial_step(part[:count])
            else:
                step.part.copy_(part)
                step.take_step()
        return Trained(step.weights.clone(), step.loss_sum[0] / samples, samples)

    def gradient(self, weights: torch.Tensor, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The dense, unclipped gradient [total] of the mean loss of one mini-batch of `rows` (int64 [n])."""
        step = self._step
        if len(rows) < step.batch_size and self.space.statistics:
            return self._eager.gradient(weights, rows, generator)
        part = first_batch(self._eager.examples, rows, generator, step.batch_size)
        self._prepare(generator)
        step.weights.copy_(weights)
        step.part.copy_(sent(part, self.device))
        step.take_gradient()
        return step.gradient.clone()

    def accuracy(self, weights: torch.Tensor, rows: torch.Tensor) -> float:
        """The accuracy in [0, 1] of `weights` [total] on training rows (int64 [n]), without augmentation."""
        examples = self._eager.examples
        return examples.accuracy(self.predict(weights, examples, rows, self._eager.settings.batch_size), rows)

    def predict(
        self, weights: torch.Tensor, examples: Examples, rows: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        """The prediction for each example, [n] or [n, K], on the device; see `Engine.predict`."""
        return self._forward.predict(weights, examples, rows, batch_size)

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._eager.full_gradient(weights, rows)

    def _prepare(self, generator: torch.Generator) -> None:
        self._eager.module.train()
        seed_layers(generator, self.device)
