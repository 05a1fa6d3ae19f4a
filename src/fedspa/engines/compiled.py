"""The compiled engine: one local step, compiled once for one shape, serves every client and round.

On CUDA the whole step - gather and augment the batch, forward, backward, clip, mask, update, pull - is also recorded as
a CUDA graph, so that it costs one launch. Nothing is read back from the device before a visit's answers are used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from fedspa.data.batches import Pixels
from fedspa.engines.capture import captured
from fedspa.engines.eager import EagerEngine
from fedspa.engines.flat import first_batch, gradient_and_loss, plan_visit, sgd_step
from fedspa.requests import Answer, Gradient, Request, Train, Trained
from fedspa.weights import ParameterSpace


class LocalStep:
    """One step of local training on tensors that stay where they are; all of its inputs are among them."""

    def __init__(self, eager: EagerEngine, batch_size: int, compiler: str | None) -> None:
        """
        Args:
            eager: the network and its training step.
            batch_size: images of every batch; smaller ones are filled up.
            compiler: a backend of torch.compile; None runs the same functions uncompiled.
        """
        self._eager, pixels = eager, eager.pixels
        weights = eager.weights
        device, dtype = weights.device, weights.dtype
        columns = 6 if pixels.augmentation.active else 1
        self.weights = weights
        self.gradient = torch.zeros_like(weights)
        self.mask = torch.ones_like(weights)
        self.anchor = torch.zeros_like(weights)
        self.velocity = torch.zeros_like(weights) if eager.settings.momentum else None
        self.rate = torch.zeros((), device=device, dtype=dtype)
        self.pull = torch.zeros((), device=device, dtype=dtype)
        """Learning rate times the strength of the pull to `anchor`; 0 does not move the weights."""
        self.loss_sum = torch.zeros((), device=device, dtype=torch.float64)
        """Over the images of all steps since it was last set to zero."""
        self.part = torch.zeros((batch_size, columns), device=device, dtype=torch.int64)
        """The batch, as `Pixels.filled_up` takes it."""

        self._backward = gradient_and_loss(eager.module, eager.space)
        gradient, step = self._take_gradient, self._update
        if compiler is not None:
            gradient = torch.compile(gradient, backend=compiler, dynamic=False)
            step = torch.compile(step, backend=compiler, dynamic=False)
        self._compiled_gradient, self._compiled_update = gradient, step
        eager.module.train()
        self.take_gradient = captured(self._run_gradient, device)
        """Set `gradient` to the dense gradient of `part` at `weights`."""
        self.take_step = captured(self._run_step, device)
        """Move `weights` by one step on `part`."""

    def start(self, request: Train) -> None:
        """Set all but `part` to where the training that is asked for begins."""
        self.weights.copy_(request.weights)
        if request.mask is None:
            self.mask.fill_(1)
        else:
            self.mask.copy_(request.mask)
        self.rate.fill_(request.learning_rate)
        self.pull.fill_(request.learning_rate * request.pull.strength if request.pull else 0)
        self.anchor.copy_(request.pull.anchor if request.pull else request.weights)
        self.loss_sum.zero_()
        if self.velocity is not None:
            self.velocity.zero_()

    @torch.no_grad()  # as in a step: what torch compiled for one mode it would compile again for the other
    def _run_gradient(self) -> None:
        with self._eager.fabric.autocast():
            gradient, _, _ = self._compiled_gradient(self.weights, self.part)
        self.gradient.copy_(gradient)

    @torch.no_grad()
    def _run_step(self) -> None:
        with self._eager.fabric.autocast():
            gradient, loss, count = self._compiled_gradient(self.weights, self.part)
        self._compiled_update(gradient, loss, count)

    def _take_gradient(
        self, weights: torch.Tensor, part: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradient [total], mean loss, and number of images of a batch."""
        batch = self._eager.pixels.filled_up(part)
        gradient, loss = self._backward(weights, batch.images, batch.labels)
        return gradient, loss, (part[:, 0] >= 0).sum()

    def _update(self, gradient: torch.Tensor, loss: torch.Tensor, count: torch.Tensor) -> None:
        self.loss_sum.add_(loss * count)
        self._eager.module.clip_and_mask(gradient, self.mask)
        sgd_step(self.weights, gradient, self.velocity, self.rate, self._eager.settings)
        self.weights.lerp_(self.anchor, self.pull)


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
        self._step = LocalStep(eager, min(eager.settings.batch_size, largest), compiler)
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
        step.start(request)
        for part in self._sent(plan[:, : len(step.part)]):
            step.part.copy_(part)
            step.take_step()
        return Trained(step.weights.clone(), step.loss_sum / samples, samples)

    def _gradient(self, request: Gradient) -> torch.Tensor:
        step = self._step
        part = first_batch(self._eager.pixels, request.rows, request.generator, len(step.part))
        self._prepare(request.generator)
        step.weights.copy_(request.weights)
        step.part.copy_(self._sent(part))
        step.take_gradient()
        return step.gradient.clone()

    def _prepare(self, generator: torch.Generator) -> None:
        self._eager.module.train()
        torch.manual_seed(generator.initial_seed())

    def _sent(self, plan: torch.Tensor) -> torch.Tensor:
        """A plan on the device; from pinned memory, because a copy from any other waits for the work queued before."""
        if self.device.type != "cuda":
            return plan
        return plan.pin_memory().to(self.device, non_blocking=True)
