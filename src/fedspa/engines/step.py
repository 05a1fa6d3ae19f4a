"""One step of local training on tensors that stay where they are: what is compiled, captured and played back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch.func import vmap

from fedspa.engines.capture import Captures
from fedspa.engines.eager import EagerEngine
from fedspa.engines.flat import gradient_and_loss, sgd_step
from fedspa.rounds.requests import Train


class LocalStep:
    """A step of one client, or of several in lockstep: then every tensor has a first dimension for its lanes.

    All inputs are attributes; a batch always has the same shape, smaller ones are filled up. A lane whose whole batch
    only fills up stays as it is. Partly filled `lanes` are told apart by nothing else.
    """

    def __init__(
        self,
        eager: EagerEngine,
        batch_size: int,
        compiler: str | None,
        lanes: int | None,
        captures: Captures,
    ) -> None:
        """
        Args:
            eager: the network and its training step.
            batch_size: images of every batch.
            compiler: a backend of torch.compile; None runs the same functions uncompiled.
            lanes: clients in lockstep; None for one alone.
            captures: records the step and, when one is first asked for, the gradient.
        """
        self._eager, self._lanes, self._captures, pixels = eager, lanes, captures, eager.pixels
        shape = () if lanes is None else (lanes,)
        columns = 6 if pixels.augmentation.active else 1
        device = eager.device
        self.weights = eager.weights.expand(*shape, -1).clone()
        self.gradient = torch.zeros_like(self.weights)
        self.mask = torch.ones_like(self.weights)
        self.anchor = torch.zeros_like(self.weights)
        self.velocity = torch.zeros_like(self._trained(self.weights)) if eager.settings.momentum else None
        # No tensor here is without a dimension: torch.compile loses what is written into such a one on the CPU.
        self.rate = torch.zeros(1, device=device, dtype=self.weights.dtype)
        self.pull = torch.zeros(1, device=device, dtype=self.weights.dtype)
        """Learning rate times the strength of the pull to `anchor`; 0 does not move the weights."""
        self.loss_sum = torch.zeros(lanes or 1, device=device, dtype=torch.float64)
        """Over the images of all steps since the start, of each lane."""
        self.part = torch.zeros((*shape, batch_size, columns), device=device, dtype=torch.int64)
        """The batch, as `Pixels.filled_up` takes it."""

        backward = gradient_and_loss(eager.module, eager.space)
        self._backward = backward if lanes is None else vmap(backward)
        gradient, update = self._take_gradient, self._update
        if compiler is not None:
            gradient = torch.compile(gradient, backend=compiler, dynamic=False)
            update = torch.compile(update, backend=compiler, dynamic=False)
        self._compiled_gradient, self._compiled_update = gradient, update
        eager.module.train()
        self.take_step = captures(self._run_step)
        """Move `weights` by one step on `part`."""

    @cached_property
    def take_gradient(self) -> Callable[[], None]:
        """Set `gradient` to the dense gradient of `part` at `weights`. Recorded here, in training mode: many a run
        never asks for it."""
        return self._captures(self._run_gradient)

    def _trained(self, vector: torch.Tensor) -> torch.Tensor:
        """The parameters' part of a vector [total], or of one a lane: a view."""
        return vector[..., : self._eager.space.trained] if self._eager.space.statistics else vector

    @property
    def batch_size(self) -> int:
        return self.part.shape[-2]

    def start(self, requests: Sequence[Train]) -> None:
        """Set all but `part` to where the trainings begin, one a lane: alike in learning rate and strength of pull."""
        rate, pull = requests[0].learning_rate, requests[0].pull
        self.rate.fill_(rate)
        self.pull.fill_(rate * pull.strength if pull else 0)
        self.loss_sum.zero_()
        if self.velocity is not None:
            self.velocity.zero_()
        lanes = [
            tensor.view(-1, self._eager.space.total) for tensor in (self.weights, self.mask, self.anchor)
        ]
        for request, weights, mask, anchor in zip(requests, *lanes, strict=False):
            weights.copy_(request.weights)
            anchor.copy_(request.pull.anchor if request.pull else request.weights)
            if request.mask is None:
                mask.fill_(1)
            else:
                mask.copy_(request.mask)

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
        """The step of `take_step` on a batch of another shape [b, 1 or 6] that nothing fills up; not compiled."""
        with self._eager.fabric.autocast():
            found = self._take_gradient(self.weights, part)
        self._update(*found)

    def _take_gradient(
        self, weights: torch.Tensor, part: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradient [trained], mean loss, running statistics after it, and number of images of a batch."""
        batch = self._eager.pixels.filled_up(part.flatten(0, -2))
        images, labels = batch.images, batch.labels
        if self._lanes is not None:
            images, labels = (tensor.unflatten(0, part.shape[:2]) for tensor in (images, labels))
        gradient, loss, statistics = self._backward(weights, images, labels)
        return gradient, loss, statistics, (part[..., 0] >= 0).sum(-1)

    def _update(
        self, gradient: torch.Tensor, loss: torch.Tensor, statistics: torch.Tensor, count: torch.Tensor
    ) -> None:
        before = self.weights if self._lanes is None else self.weights.clone()
        weights = self._trained(self.weights)
        self._eager.module.clip_and_mask(gradient, self._trained(self.mask))
        sgd_step(weights, gradient, self.velocity, self.rate, self._eager.settings)
        weights.lerp_(self._trained(self.anchor), self.pull)
        if statistics.shape[-1]:
            self.weights[..., self._eager.space.trained :].copy_(statistics)
        if self._lanes is not None:
            trains = count > 0  # without images the loss is 0 / 0
            self.weights.copy_(torch.where(trains[:, None], self.weights, before))
            loss = torch.where(trains, loss, 0)
        self.loss_sum.add_(loss * count)


def sent(plan: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A plan on the device; from pinned memory, because a copy from any other waits for the work queued before."""
    return plan.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else plan
