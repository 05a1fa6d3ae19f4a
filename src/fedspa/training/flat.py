"""Local training as functions of flat weights, for the compiled engine."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.func import functional_call, grad_and_value

from fedspa.core.settings import TrainingSettings
from fedspa.core.weights import ParameterSpace
from fedspa.data.examples import Batch, Examples
from fedspa.training.base import LocalTask
from fedspa.training.local_training import LocalTraining

GradientAndLoss: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
]


class _Loss(nn.Module):
    """A module whose forward pass is the training step, because `functional_call` calls only a forward pass."""

    def __init__(self, module: LocalTraining) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.module.training_step(Batch(inputs, targets))


def gradient_and_loss(module: LocalTraining, space: ParameterSpace) -> GradientAndLoss:
    """The function (weights [total], inputs [B, ...], targets [B, ...]) -> gradient [trained] and loss of the training
    step, and the running statistics [total - trained] after it.

    It is a pure function: it neither reads nor changes the network's tensors and gradients.
    """
    loss = _Loss(module)

    def of_weights(
        weights: torch.Tensor, statistics: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        after = statistics.clone()  # the layers write into it
        tensors = chain(space.parameters.items(weights), space.running.items(after))
        named = {f"module.network.{name}": tensor for name, tensor in tensors}
        return functional_call(loss, named, (inputs, targets)), after

    differentiated: Callable[..., Any] = grad_and_value(of_weights, has_aux=True)

    def gradient_and_loss(
        weights: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = weights.split([space.trained, space.total - space.trained])
        gradient, (value, after) = differentiated(*parts, inputs, targets)
        return gradient, value, after

    return gradient_and_loss


def outputs(
    module: LocalTraining, space: ParameterSpace
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The pure function (weights [total], inputs [B, ...]) -> the network's outputs."""

    def of_weights(weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return functional_call(module.network, dict(space.items(weights)), (inputs,))

    return of_weights


def sgd_step(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    velocity: torch.Tensor | None,
    rate: float | torch.Tensor,
    settings: TrainingSettings,
) -> None:
    """Take the step of torch.optim.SGD on weights of any shape. It changes weights, gradient and velocity in place.

    `velocity` starts at zero; it is None if the momentum is 0.
    """
    gradient.add_(weights, alpha=settings.weight_decay)
    if velocity is not None:
        gradient = velocity.mul_(settings.momentum).add_(gradient)
    weights.sub_(gradient * rate)


def plan_batches(examples: Examples, task: LocalTask, settings: TrainingSettings) -> torch.Tensor:
    """All batches of a client's training, int64 [steps, batch, 1 + draws] on the CPU, as `Examples.epoch` draws them.

    Partial batches are filled up with rows of -1, so that all have one shape.
    """
    epochs = [examples.plan(task.rows, task.generator) for _ in range(task.epochs)]
    batches = [_batches(plan, settings.batch_size, settings.drop_last) for plan in epochs]
    empty = torch.empty((0, settings.batch_size, 1 + examples.draws), dtype=torch.int64)
    return torch.cat([empty, *batches])


def _batches(plan: torch.Tensor, size: int, drop_last: bool) -> torch.Tensor:
    """A plan [n, columns] as batches [steps, size, columns]."""
    if drop_last:
        plan = plan[: len(plan) - len(plan) % size]
    missing = -len(plan) % size
    filler = torch.zeros((missing, plan.shape[1]), dtype=torch.int64)
    filler[:, 0] = -1
    return torch.cat([plan, filler]).view(-1, size, plan.shape[1])


def first_batch(
    examples: Examples, rows: torch.Tensor, generator: torch.Generator, size: int
) -> torch.Tensor:
    """The first batch of an epoch, int64 [size, 1 + draws] on the CPU, filled up with rows of -1."""
    return _batches(examples.plan(rows, generator)[:size], size, drop_last=False)[0]
