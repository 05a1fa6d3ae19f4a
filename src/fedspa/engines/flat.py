"""Local training as functions of flat weights: what engines share that do not run one client's batches one by one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.func import functional_call, grad_and_value

from fedspa.data.batches import Batch, Pixels
from fedspa.local_training import LocalTraining
from fedspa.rounds.requests import Train
from fedspa.settings import TrainingSettings
from fedspa.weights import ParameterSpace

GradientAndLoss: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
]


class _Loss(nn.Module):
    """A module whose forward pass is the training step, which is what `functional_call` can call."""

    def __init__(self, module: LocalTraining) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.module.training_step(Batch(images, labels))


def gradient_and_loss(module: LocalTraining, space: ParameterSpace) -> GradientAndLoss:
    """(weights [total], images [B, C, H, W], labels [B]) -> gradient [trained] and loss of the module's training step,
    and the running statistics [total - trained] after it.

    A pure function: neither the network's tensors nor their gradients are looked at or changed.
    """
    loss = _Loss(module)

    def of_weights(
        weights: torch.Tensor, statistics: torch.Tensor, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        after = statistics.clone()  # the layers write into it
        tensors = chain(space.parameters.items(weights), space.running.items(after))
        named = {f"module.network.{name}": tensor for name, tensor in tensors}
        return functional_call(loss, named, (images, labels)), after

    differentiated: Callable[..., Any] = grad_and_value(of_weights, has_aux=True)

    def gradient_and_loss(
        weights: torch.Tensor, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = weights.split([space.trained, space.total - space.trained])
        gradient, (value, after) = differentiated(*parts, images, labels)
        return gradient, value, after

    return gradient_and_loss


def logits(
    module: LocalTraining, space: ParameterSpace
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(weights [total], images [B, C, H, W]) -> what the network gives, [B, classes]. A pure function."""

    def of_weights(weights: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        return functional_call(module.network, dict(space.items(weights)), (images,))

    return of_weights


def sgd_step(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    velocity: torch.Tensor | None,
    rate: float | torch.Tensor,
    settings: TrainingSettings,
) -> None:
    """torch.optim.SGD's step on weights of any shape, which it changes in place, as it does the other two.

    `velocity` starts at zero, and is None where the momentum is 0.
    """
    gradient.add_(weights, alpha=settings.weight_decay)
    if velocity is not None:
        gradient = velocity.mul_(settings.momentum).add_(gradient)
    weights.sub_(gradient * rate)


def plan_visit(pixels: Pixels, request: Train, settings: TrainingSettings) -> torch.Tensor:
    """All batches of a visit, int64 [steps, batch, 1 or 6] on the CPU, drawn as `Pixels.epoch` draws them.

    Partial batches are filled up with rows of -1, so that all have one shape.
    """
    epochs = [pixels.plan(request.rows, request.generator) for _ in range(request.epochs)]
    batches = [_batches(plan, settings.batch_size, settings.drop_last) for plan in epochs]
    columns = 6 if pixels.augmentation.active else 1
    return torch.cat([torch.empty((0, settings.batch_size, columns), dtype=torch.int64), *batches])


def _batches(plan: torch.Tensor, size: int, drop_last: bool) -> torch.Tensor:
    """A plan [n, columns] as batches [steps, size, columns]."""
    if drop_last:
        plan = plan[: len(plan) - len(plan) % size]
    missing = -len(plan) % size
    filler = torch.zeros((missing, plan.shape[1]), dtype=torch.int64)
    filler[:, 0] = -1
    return torch.cat([plan, filler]).view(-1, size, plan.shape[1])


def first_batch(pixels: Pixels, rows: torch.Tensor, generator: torch.Generator, size: int) -> torch.Tensor:
    """The first batch of an epoch, int64 [size, 1 or 6] on the CPU, filled up with rows of -1."""
    return _batches(pixels.plan(rows, generator)[:size], size, drop_last=False)[0]
