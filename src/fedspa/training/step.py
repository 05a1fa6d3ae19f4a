"""Steps of local training on tensors that stay in place: they are compiled, captured and replayed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch

from fedspa.core.transfers import sent
from fedspa.training.base import LocalTask
from fedspa.training.capture import Captures
from fedspa.training.eager import EagerEngine
from fedspa.training.flat import gradient_and_loss, sgd_step

STRIDE = 16
"""The largest number of steps in one graph. A client of n steps then takes at most n / 16 + 15 launches. The host
blocks when about a thousand launches wait."""


class StepTensors(NamedTuple):
    """The state of a client's training: [total] each, unless noted. All steps of a lane write into these tensors.

    Every tensor has at least one dimension: on the CPU torch.compile loses writes into a scalar tensor.
    """

    weights: torch.Tensor
    mask: torch.Tensor
    anchor: torch.Tensor
    rate: torch.Tensor
    """The learning rate [1]."""
    proximal: torch.Tensor
    """The learning rate times the strength of the proximal term [1]; 0 does not change the weights."""
    loss_sum: torch.Tensor
    """The sum of the losses over the examples of all steps since the start: float64 [1]."""
    velocity: torch.Tensor | None
    """The momentum buffer [trained]; None without momentum."""
    correction: torch.Tensor | None = None
    trainable: torch.Tensor | None = None
    frozen: torch.Tensor | None = None
    """The values of the coordinates that are not trainable."""
    forward: torch.Tensor | None = None
    """The coordinates that are active in the forward pass."""


class StepFunctions:
    """The two halves of a step, compiled once for all lanes. They use only tensors that they get as arguments."""

    def __init__(self, eager: EagerEngine, batch_size: int, compiler: str | None) -> None:
        """
        Args:
            eager: the network and its training step.
            batch_size: the number of examples in a whole batch. A batch of another size is computed uncompiled.
            compiler: a backend of torch.compile; None runs the same functions uncompiled.
        """
        self.eager, self.batch_size = eager, batch_size
        self._backward = gradient_and_loss(eager.module, eager.space)
        self._gradient, self._update = self._plain_gradient, self._plain_update
        if compiler is not None:
            self._gradient = torch.compile(self._plain_gradient, backend=compiler, dynamic=False)
            self._update = torch.compile(self._plain_update, backend=compiler, dynamic=False)

    def trained(self, vector: torch.Tensor) -> torch.Tensor:
        """The parameters of a vector [total]: a view [trained]."""
        return vector[: self.eager.space.trained] if self.eager.space.statistics else vector

    @torch.no_grad()  # as in a step: torch would compile again for another gradient mode
    def gradient(self, weights: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """The gradient [trained] of a batch, int64 [B, 1 + draws]."""
        return self._found(weights, part)[0]

    @torch.no_grad()
    def step(self, tensors: StepTensors, part: torch.Tensor) -> None:
        """Take a step on a batch, int64 [B, 1 + draws]."""
        update = self._update if len(part) == self.batch_size else self._plain_update
        active = tensors.weights if tensors.forward is None else tensors.weights * tensors.forward
        update(tensors, *self._found(active, part))

    def _found(self, weights: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradient = self._gradient if len(part) == self.batch_size else self._plain_gradient
        with self.eager.fabric.autocast():
            return gradient(weights, part)

    def _plain_gradient(
        self, weights: torch.Tensor, part: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradient [trained], mean loss, running statistics after it, and number of examples of a batch."""
        batch = self.eager.examples.filled_up(part)
        gradient, loss, statistics = self._backward(weights, batch.inputs, batch.targets)
        return gradient, loss, statistics, (part[:, 0] >= 0).sum()

    def _plain_update(
        self,
        tensors: StepTensors,
        gradient: torch.Tensor,
        loss: torch.Tensor,
        statistics: torch.Tensor,
        count: torch.Tensor,
    ) -> None:
        weights = self.trained(tensors.weights)
        correction, trainable = (
            vector if vector is None else self.trained(vector)
            for vector in (tensors.correction, tensors.trainable)
        )
        self.eager.module.finish_gradient(gradient, self.trained(tensors.mask), correction, trainable)
        sgd_step(weights, gradient, tensors.velocity, tensors.rate, self.eager.settings)
        weights.lerp_(self.trained(tensors.anchor), tensors.proximal)
        if len(statistics):
            tensors.weights[self.eager.space.trained :].copy_(statistics)
        if tensors.trainable is not None and tensors.frozen is not None:
            tensors.weights.copy_(torch.where(tensors.trainable > 0, tensors.weights, tensors.frozen))
        tensors.loss_sum.add_(loss * count)


class LocalStep:
    """The steps of one lane. All batches have one shape; smaller ones are filled up."""

    def __init__(self, functions: StepFunctions, steps: int, captures: Captures) -> None:
        """
        Args:
            steps: the number of steps of the longest plan that is loaded at once.
            captures: records the steps; also the gradient at its first use.
        """
        eager = functions.eager
        self._functions, self._captures = functions, captures
        self._stride = min(STRIDE, steps) if captures.records else 1
        weights, device = eager.weights, eager.device
        self.gradient = torch.zeros_like(weights)
        self.part = torch.zeros(
            (functions.batch_size, 1 + eager.examples.draws), device=device, dtype=torch.int64
        )
        """The batch of the gradient, in the form of `Examples.filled_up`."""
        self.plan = torch.zeros((steps, *self.part.shape), device=device, dtype=torch.int64)
        """The batches of the steps, in the same form."""
        self._next = torch.zeros(1, device=device, dtype=torch.int64)
        """The index in the plan of the next step's batch."""
        self.tensors = StepTensors(
            weights=weights,
            mask=torch.ones_like(weights),
            anchor=torch.zeros_like(weights),
            rate=weights.new_zeros(1),
            proximal=weights.new_zeros(1),
            loss_sum=torch.zeros(1, device=device, dtype=torch.float64),
            velocity=torch.zeros_like(functions.trained(weights)) if eager.settings.momentum else None,
        )
        self._recorded: dict[bool, tuple[Callable[[], None], Callable[[], None]]] = {}
        self._record(self.tensors)

    @cached_property
    def _extended(self) -> StepTensors:
        """These tensors with a correction, frozen coordinates and a forward mask. Most runs do not need them."""
        weights = self.tensors.weights
        return self.tensors._replace(
            correction=torch.zeros_like(weights),
            trainable=torch.ones_like(weights),
            frozen=weights.clone(),
            forward=torch.ones_like(weights),
        )

    def _record(self, tensors: StepTensors) -> None:
        """Record one step on these tensors, and a stride of steps. Recording changes all tensors."""

        def one() -> None:
            self._functions.step(tensors, self.plan.index_select(0, self._next).squeeze(0))
            self._next.add_(1).remainder_(len(self.plan))

        def many() -> None:
            for _ in range(self._stride):
                one()

        self._functions.eager.module.train()
        single = self._captures(one)
        kind = tensors.frozen is not None
        self._recorded[kind] = single, self._captures(many) if self._stride > 1 else single

    @cached_property
    def take_gradient(self) -> Callable[[], None]:
        """The function that sets `gradient` to the dense gradient of `part` at the weights.

        It is recorded at its first use, in training mode, because many runs do not need it.
        """

        def take() -> None:
            gradient = self._functions.gradient(self.tensors.weights, self.part)
            self._functions.trained(self.gradient).copy_(gradient)

        return self._captures(take)

    def start(self, task: LocalTask) -> None:
        """Set all tensors but the plan to the start of a client's training."""
        extended = any(vector is not None for vector in (task.correction, task.trainable, task.forward))
        tensors = self._extended if extended else self.tensors
        if extended not in self._recorded:
            self._record(tensors)
        self._one, self._many = self._recorded[extended]
        proximal = task.proximal
        tensors.rate.fill_(task.learning_rate)
        tensors.proximal.fill_(task.learning_rate * proximal.strength if proximal else 0)
        tensors.loss_sum.zero_()
        if tensors.velocity is not None:
            tensors.velocity.zero_()
        tensors.weights.copy_(task.weights)
        tensors.anchor.copy_(proximal.anchor if proximal else task.weights)
        _set(tensors.mask, task.mask, 1)
        if tensors.frozen is not None:
            _set(tensors.correction, task.correction, 0)
            _set(tensors.trainable, task.trainable, 1)
            _set(tensors.forward, task.forward, 1)
            tensors.frozen.copy_(task.weights)
        self._current = tensors

    def take(self, plan: torch.Tensor) -> None:
        """Take a step on each batch of a plan, int64 [steps, B, 1 + draws] on the CPU."""
        for part in plan.split(len(self.plan)):
            self.plan[: len(part)].copy_(sent(part, self.plan.device))
            self._next.zero_()
            if self._functions.eager.space.statistics:
                self._take_each((part[:, :, 0] >= 0).sum(1).tolist())
                continue
            strides, rest = divmod(len(part), self._stride)
            for _ in range(strides):
                self._many()
            for _ in range(rest):
                self._one()

    def _take_each(self, sizes: list[int]) -> None:
        """Take the steps one by one. With BatchNorm no batch is filled up: filler rows would change its averages."""
        for place, size in enumerate(sizes):
            if size == len(self.part):
                self._one()
            else:
                self._functions.step(self._current, self.plan[place, :size])
                self._next.add_(1)


def _set(target: torch.Tensor | None, values: torch.Tensor | None, default: float) -> None:
    """Write values, or the default if there are none, into a tensor that stays in place."""
    assert target is not None
    if values is None:
        target.fill_(default)
    else:
        target.copy_(values)
