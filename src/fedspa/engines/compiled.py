"""The compiled engine: one local step, compiled once for one shape, serves every client and round.

On CUDA the whole step - gather and augment the batch, forward, backward, clip, mask, update, pull - is also recorded as
a CUDA graph, so that it costs one launch. Nothing is read back from the device before a visit's answers are used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedspa.engines.choice import Workload
from fedspa.engines.eager import EagerEngine
from fedspa.engines.flat import first_batch, plan_visit
from fedspa.engines.over_eager import OverEager
from fedspa.engines.step import sent
from fedspa.randomness import seed_layers
from fedspa.rounds.requests import Gradient, Train, Trained


class CompiledEngine(OverEager):
    """Draws each client's batches as the eager engine does, and takes its steps; only sums differ, by rounding.

    Layers that draw for themselves, such as dropout, draw from the same seed by the compiler's own generator: runs
    repeat, but their draws are not the eager engine's.
    """

    name = "compiled"
    clients_at_once = 16
    """Visits whose training is queued before anything is read back; each holds its weights, update and masks."""

    def __init__(self, eager: EagerEngine, workload: Workload, compiler: str | None) -> None:
        """As for `OverEager`."""
        super().__init__(eager, workload, compiler, lanes=None)

    def _train(self, requests: Sequence[Train]) -> list[Trained]:
        """One after another, none of them waiting for the device."""
        return [self._trained(request) for request in requests]

    def _gradients(self, requests: Sequence[Gradient]) -> list[torch.Tensor]:
        return [self._gradient(request) for request in requests]

    def _trained(self, request: Train) -> Trained:
        step, settings = self._step, self._eager.settings
        plan = plan_visit(self._eager.pixels, request, settings)
        counts = (plan[:, :, 0] >= 0).sum(1).tolist()
        samples = sum(counts)
        self._prepare(request.generator)
        step.start([request])
        for part, count in zip(sent(plan[:, : step.batch_size], self.device), counts, strict=True):
            if count < len(part) and self.space.statistics:
                step.take_partial_step(
                    part[:count]
                )  # what fills a batch up would count in BatchNorm's averages
            else:
                step.part.copy_(part)
                step.take_step()
        return Trained(step.weights.clone(), step.loss_sum[0] / samples, samples)

    def _gradient(self, request: Gradient) -> torch.Tensor:
        step = self._step
        if len(request.rows) < step.batch_size and self.space.statistics:
            (gradient,) = self._eager.answer([request])
            assert isinstance(gradient, torch.Tensor)
            return gradient
        part = first_batch(self._eager.pixels, request.rows, request.generator, step.batch_size)
        self._prepare(request.generator)
        step.weights.copy_(request.weights)
        step.part.copy_(sent(part, self.device))
        step.take_gradient()
        return step.gradient.clone()

    def _prepare(self, generator: torch.Generator) -> None:
        self._eager.module.train()
        seed_layers(generator, self.device)
