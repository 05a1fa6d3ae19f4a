"""One step of local training on tensors that stay where they are: compiled, captured and played back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from fedspa.training.base import LocalTask
from fedspa.training.capture import Captures
from fedspa.training.eager import EagerEngine
from fedspa.training.flat import gradient_and_loss, sgd_step


class LocalStep:
    """A step of one client. All inputs are attributes; a batch always has one shape, smaller ones are filled up."""

    def __init__(
        self,
        eager: EagerEngine,
        batch_size: int,
        compiler: str | None,
        captures: Captures,
    ) -> None:
        """
        Args:
            eager: the network and its training step.
            batch_size: examples of every batch.
            compiler: a backend of torch.compile; None runs the same functions uncompiled.
            captures: records the step and, when one is first asked for, the gradient.
        """
        self._eager, self._captures = eager, captures
        device = eager.device
        self.weights = eager.weights
        self.gradient = torch.zeros_like(self.weights)
        self.mask = torch.ones_like(self.weights)
        self.anchor = torch.zeros_like(self.weights)
        self.velocity = torch.zeros_like(self._trained(self.weights)) if eager.settings.momentum else None
        # No tensor here is without a dimension: torch.compile loses what is written into such a one on the CPU.
        self.rate = torch.zeros(1, device=device, dtype=self.weights.dtype)
        self.proximal = torch.zeros(1, device=device, dtype=self.weights.dtype)
        """Learning rate times the strength of the proximal term; 0 does not move the weights."""
        self.loss_sum = torch.zeros(1, device=device, dtype=torch.float64)
        """Over the examples of all steps since the start."""
        self.part = torch.zeros((batch_size, 1 + eager.examples.draws), device=device, dtype=torch.int64)
        """The batch, as `Examples.filled_up` takes it."""

        self._backward = gradient_and_loss(eager.module, eager.space)
        gradient, update = self._take_gradient, self._update
        if compiler is not None:
            gradient = torch.compile(gradient, backend=compiler, dynamic=False)
            update = torch.compile(update, backend=compiler, dynamic=False)
        self._compiled_gradient, self._compiled_update = gradient, update
        eager.module.train()
        self._extended = False
        """Whether the step has a correction and frozen coordinates; in most runs it never does."""
        self._steps: dict[bool, Callable[[], None]] = {}
        self.take_step = self._recorded_step()
        """Move `weights` by one step on `part`."""

    @cached_property
    def _extension(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The correction, the trainable coordinates, and the weights of the others: each [total]."""
        return torch.zeros_like(self.weights), torch.ones_like(self.weights), self.weights.clone()

    def _recorded_step(self) -> Callable[[], None]:
        """The step of this kind, recorded when it is first needed. Recording changes all tensors."""
        if self._extended not in self._steps:
            _ = self._extension if self._extended else None  # no tensor is made while recording
            self._eager.module.train()
            self._steps[self._extended] = self._captures(self._run_step)
        return self._steps[self._extended]

    @cached_property
    def take_gradient(self) -> Callable[[], None]:
        """Set `gradient` to the dense gradient of `part` at `weights`. Recorded here, in training mode: many a run
        never asks for it."""
        return self._captures(self._run_gradient)

    def _trained(self, vector: torch.Tensor) -> torch.Tensor:
        """The parameters' part of a vector [total]: a view."""
        return vector[: self._eager.space.trained] if self._eager.space.statistics else vector

    @property
    def batch_size(self) -> int:
        return len(self.part)

    def start(self, task: LocalTask) -> None:
        """Set all but `part` to the start of a client's training."""
        proximal = task.proximal
        self._extended = task.correction is not None or task.trainable is not None
        self.take_step = self._recorded_step()
        self.rate.fill_(task.learning_rate)
        self.proximal.fill_(task.learning_rate * proximal.strength if proximal else 0)
        self.loss_sum.zero_()
        if self.velocity is not None:
            self.velocity.zero_()
        self.weights.copy_(task.weights)
        self.anchor.copy_(proximal.anchor if proximal else task.weights)
        _set(self.mask, task.mask, 1)
        if self._extended:
            correction, trainable, frozen = self._extension
            _set(correction, task.correction, 0)
            _set(trainable, task.trainable, 1)
            frozen.copy_(task.weights)

    @torch.no_grad()  # as in a step: what torch compiled for one mode it would compile again for the other
    def _run_gradient(self) -> None:
        with self._eager.fabric.autocast():
            gradient, _, _, _ = self._compiled_gradient(self.weights, self.part)
        self._trained(self.gradient).copy_(gradient)

    @torch.no_grad()
    def _run_step(self) -> None:
        with self._eager.fabric.autocast():
            gradient, loss, statistics, count = self._compiled_gradient(self.weights, self.part)
        self._compiled_update(gradient, loss, statistics, count)

    @torch.no_grad()
    def take_partial_step(self, part: torch.Tensor) -> None:
        """The step of `take_step` on a batch of another shape [b, 1 + draws] that nothing fills up; not compiled."""
        with self._eager.fabric.autocast():
            found = self._take_gradient(self.weights, part)
        self._update(*found)

    def _take_gradient(
        self, weights: torch.Tensor, part: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradient [trained], mean loss, running statistics after it, and number of examples of a batch."""
        batch = self._eager.examples.filled_up(part)
        gradient, loss, statistics = self._backward(weights, batch.inputs, batch.targets)
        return gradient, loss, statistics, (part[:, 0] >= 0).sum()

    def _update(
        self, gradient: torch.Tensor, loss: torch.Tensor, statistics: torch.Tensor, count: torch.Tensor
    ) -> None:
        weights = self._trained(self.weights)
        correction, trainable, frozen = self._extension if self._extended else (None, None, None)
        extension = [v if v is None else self._trained(v) for v in (correction, trainable)]
        self._eager.module.finish_gradient(gradient, self._trained(self.mask), *extension)
        sgd_step(weights, gradient, self.velocity, self.rate, self._eager.settings)
        weights.lerp_(self._trained(self.anchor), self.proximal)
        if len(statistics):
            self.weights[self._eager.space.trained :].copy_(statistics)
        if trainable is not None and frozen is not None:
            self.weights.copy_(torch.where(trainable > 0, self.weights, frozen))
        self.loss_sum.add_(loss * count)


def _set(target: torch.Tensor, values: torch.Tensor | None, default: float) -> None:
    """Write values into a tensor that stays where it is; the default where there are none."""
    if values is None:
        target.fill_(default)
    else:
        target.copy_(values)


def sent(plan: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A plan on the device; from pinned memory, because a copy from any other waits for the work queued before."""
    return plan.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else plan
