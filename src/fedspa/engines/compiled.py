"""The compiled engine: one local step, compiled once for one shape, serves every client and round.

On CUDA the whole step - gather and augment the batch, forward, backward, clip, mask, update, pull - is also recorded as
a CUDA graph, so that it costs one launch. Nothing is read back from the device before a visit's answers are used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from fedspa.data.batches import Pixels
from fedspa.engines.eager import EagerEngine
from fedspa.engines.flat import first_batch, plan_visit
from fedspa.engines.step import LocalStep, sent
from fedspa.requests import Answer, Gradient, Request, Train, Trained
from fedspa.weights import ParameterSpace


class CompiledEngine:
    """Draws each client's batches as the eager engine does, and takes its steps; only sums differ, by rounding.

    Layers that draw for themselves, such as dropout, draw from the same seed by the compiler's own generator: runs
    repeat, but their draws are not the eager engine's.
    """

    name = "compiled"
    together = 16
    """Visits whose training is queued before anything is read back; each holds its weights, update and masks."""

    def __init__(self, eager: EagerEngine, largest: int, compiler: str | None) -> None:
        """
        Args:
            eager: holds the network, and does what concerns one model alone.
            largest: training rows of the largest client: no batch is larger.
            compiler: a backend of torch.compile; None runs the same functions uncompiled.
        """
        self._eager = eager
        begin = time.perf_counter()
        self._step = LocalStep(eager, min(eager.settings.batch_size, largest), compiler, lanes=None)
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

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """One request after another, none of them waiting for the device."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Answer:
        match request:
            case Train():
                return self._train(request)
            case Gradient():
                return self._gradient(request)
            case _:
                return self._eager.answer([request])[0]

    def _train(self, request: Train) -> Trained:
        step, settings = self._step, self._eager.settings
        plan = plan_visit(self._eager.pixels, request, settings)
        samples = int((plan[:, :, 0] >= 0).sum())
        self._prepare(request.generator)
        step.start([request])
        for part in sent(plan[:, : step.batch_size], self.device):
            step.part.copy_(part)
            step.take_step()
        return Trained(step.weights.clone(), step.loss_sum[0] / samples, samples)

    def _gradient(self, request: Gradient) -> torch.Tensor:
        step = self._step
        part = first_batch(self._eager.pixels, request.rows, request.generator, step.batch_size)
        self._prepare(request.generator)
        step.weights.copy_(request.weights)
        step.part.copy_(sent(part, self.device))
        step.take_gradient()
        return step.gradient.clone()

    def _prepare(self, generator: torch.Generator) -> None:
        self._eager.module.train()
        torch.manual_seed(generator.initial_seed())
