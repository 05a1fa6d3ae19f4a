"""Steps of local training on tensors that stay in place: they are compiled, captured and replayed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from fedspa.core.randomness import seed_layers
from fedspa.core.transfers import sent
from fedspa.training.base import LocalTask
from fedspa.training.capture import Captures
from fedspa.training.eager import EagerEngine
from fedspa.training.flat import FlatNetwork, sgd_step

STRIDE = 16
"""The largest number of steps in one graph. A client of n steps then takes at most n / 16 + 15 launches. The host
blocks when about a thousand launches wait."""


class StepTensors(NamedTuple):
    """The state of a client's training: [trained] each, unless noted, in the order of `Layout`.

    All steps of a lane write into these tensors. Terms of a step that a client does not use are None, so that its step
    does not read them. Every tensor has at least one dimension: on the CPU torch.compile loses writes into a scalar.
    """

    weights: torch.Tensor
    statistics: torch.Tensor
    """The running statistics [total - trained]."""
    rate: torch.Tensor
    """The learning rate [1]."""
    pull: torch.Tensor
    """The learning rate times the strength of the proximal term [1]."""
    loss_sum: torch.Tensor
    """The sum of the losses over the examples of all steps since the start: float64 [1]."""
    velocity: torch.Tensor | None = None
    """The momentum buffer; None without momentum."""
    cast: torch.Tensor | None = None
    """The weights of the next forward pass, which the update writes; None if they are `weights`."""
    mask: torch.Tensor | None = None
    anchor: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    trainable: torch.Tensor | None = None
    """[total]"""
    frozen: torch.Tensor | None = None
    """The values [total] of the coordinates that are not trainable."""
    forward: torch.Tensor | None = None
    """The coordinates that are active in the forward pass."""

    @property
    def read(self) -> torch.Tensor:
        """The weights of the next forward pass."""
        return self.weights if self.cast is None else self.cast

    def write_read(self) -> None:
        """Bring `read` up to date with the weights."""
        if self.cast is not None:
            self.cast.copy_(self.weights if self.forward is None else self.weights * self.forward)


class StepFunctions:
    """The two halves of a step, compiled once for all lanes. They use only tensors that they get as arguments."""

    def __init__(self, eager: EagerEngine, batch_size: int, compiler: str | None) -> None:
        """
        Args:
            eager: the network and its training step.
            batch_size: the number of examples in a whole batch. A batch of another size is computed uncompiled.
            compiler: a backend of torch.compile; None runs the same functions uncompiled.
        """
        self.eager, self.batch_size, self.network = eager, batch_size, FlatNetwork(eager)
        compiled: Callable[..., Any] = lambda function: function  # noqa: E731
        if compiler is not None:  # fullgraph: a part that cannot be compiled is an error, not a slow run
            compiled = partial(torch.compile, backend=compiler, dynamic=False, fullgraph=True)
        self._gradient, self._update = compiled(self._plain_gradient), compiled(self._plain_update)
        self.outputs = compiled(self.network.outputs)

    @torch.no_grad()  # as in a step: torch would compile again for another gradient mode
    def gradient(
        self, weights: torch.Tensor, statistics: torch.Tensor, part: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The gradient [trained], mean loss, running statistics after it, and number of examples of a batch.

        `weights`: [trained], in the dtype of the forward pass. `part`: int64 [B, 1 + draws].
        """
        gradient = self._gradient if len(part) == self.batch_size else self._plain_gradient
        return gradient(weights, statistics, part)

    @torch.no_grad()
    def step(self, tensors: StepTensors, part: torch.Tensor) -> None:
        """Take a step on a batch, int64 [B, 1 + draws]."""
        update = self._update if len(part) == self.batch_size else self._plain_update
        update(tensors, *self.gradient(tensors.read, tensors.statistics, part))

    def _plain_gradient(
        self, weights: torch.Tensor, statistics: torch.Tensor, part: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        batch = self.eager.examples.filled_up(part)
        return *self.network.gradient(weights, statistics, batch), (part[:, 0] >= 0).sum()

    def _plain_update(
        self,
        tensors: StepTensors,
        gradient: torch.Tensor,
        loss: torch.Tensor,
        statistics: torch.Tensor,
        count: torch.Tensor,
    ) -> None:
        weights, trainable = tensors.weights, tensors.trainable
        gradient = gradient.to(weights.dtype, copy=True)  # the compiler then writes no gradient into memory
        scope = None if trainable is None else trainable[: len(weights)]
        self.eager.module.finish_gradient(gradient, tensors.mask, tensors.correction, scope)
        sgd_step(weights, gradient, tensors.velocity, tensors.rate, self.eager.settings)
        if tensors.anchor is not None:
            weights.lerp_(tensors.anchor, tensors.pull)
        tensors.statistics.copy_(statistics)
        if trainable is not None and tensors.frozen is not None:
            for part, kept, values in zip(
                (weights, tensors.statistics),
                *(vector.split([len(weights), len(statistics)]) for vector in (trainable, tensors.frozen)),
                strict=True,
            ):
                part.copy_(torch.where(kept > 0, part, values))
        tensors.write_read()
        tensors.loss_sum.add_(loss * count)


class _Recorded(NamedTuple):
    """A recorded step, and a stride of steps, on tensors."""

    tensors: StepTensors
    one: Callable[[], None]
    many: Callable[[], None]


class LocalStep:
    """The steps of one lane. All batches have one shape; smaller ones are filled up."""

    def __init__(
        self, functions: StepFunctions, steps: int, captures: Captures, terms: Collection[str] = ()
    ) -> None:
        """
        Args:
            steps: the number of steps of the longest plan that is loaded at once.
            captures: records the steps; also the gradient at its first use.
            terms: the optional vectors of `StepTensors` that most clients use. Their step is recorded now.
        """
        eager = functions.eager
        self._functions, self._captures = functions, captures
        self._layout = layout = functions.network.layout
        self._stride = min(STRIDE, steps) if captures.records else 1
        self._start, device = layout.ordered(eager.weights), eager.device
        weights, statistics = (part.clone() for part in layout.halves(self._start))
        self._gradient = torch.zeros_like(self._start)
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
            statistics=statistics,
            rate=weights.new_zeros(1),
            pull=weights.new_zeros(1),
            loss_sum=torch.zeros(1, device=device, dtype=torch.float64),
            velocity=torch.zeros_like(weights) if eager.settings.momentum else None,
            cast=weights.to(functions.network.dtype) if functions.network.dtype != weights.dtype else None,
        )
        self._vectors: dict[str, torch.Tensor] = {}
        self._recorded: dict[frozenset[str], _Recorded] = {}
        self._with(frozenset(terms))

    def _with(self, terms: frozenset[str]) -> _Recorded:
        """The step with these terms. Recording it at its first use changes all tensors."""
        if terms not in self._recorded:
            for name in terms - self._vectors.keys():
                whole = name in ("trainable", "frozen")
                self._vectors[name] = torch.ones_like(self._start if whole else self.tensors.weights)
            tensors = self.tensors._replace(**{name: self._vectors[name] for name in terms})
            if "forward" in terms and tensors.cast is None:
                tensors = tensors._replace(cast=torch.zeros_like(tensors.weights))
            self._recorded[terms] = self._record(tensors)
        return self._recorded[terms]

    def _record(self, tensors: StepTensors) -> _Recorded:
        """Record one step on these tensors, and a stride of steps."""

        def one() -> None:
            self._functions.step(tensors, self.plan.index_select(0, self._next).squeeze(0))
            self._next.add_(1).remainder_(len(self.plan))

        def many() -> None:
            for _ in range(self._stride):
                one()

        self._functions.eager.module.train()
        single = self._captures(one)
        return _Recorded(tensors, single, self._captures(many) if self._stride > 1 else single)

    @cached_property
    def take_gradient(self) -> Callable[[], None]:
        """The function that sets the gradient to that of `part` at the weights.

        It is recorded at its first use, in training mode, because many runs do not need it.
        """
        return self._captures(lambda: self._take_gradient(self.part))

    def _take_gradient(self, part: torch.Tensor) -> None:
        gradient = self._functions.gradient(self.tensors.read, self.tensors.statistics, part)[0]
        self._gradient[: len(gradient)].copy_(gradient)

    def gradient(self, weights: torch.Tensor, part: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The dense gradient [total] of a batch, int64 [n, 1 + draws] on the CPU, at weights [total].

        `generator`: its seed serves layers that draw random numbers.
        """
        self._functions.eager.module.train()
        self._place(weights, self.tensors)
        there = sent(part, self.part.device)
        if len(part) == len(self.part):
            take = self.take_gradient
            self.part.copy_(there)
        else:
            take = partial(self._take_gradient, there)
        seed_layers(generator, self.plan.device)  # now, because a recording draws too
        take()
        return self._layout.restored(self._gradient)

    def _place(self, vector: torch.Tensor, tensors: StepTensors) -> None:
        """Set the weights [total], and those of the next forward pass."""
        weights, statistics = self._layout.halves(self._layout.ordered(vector))
        tensors.weights.copy_(weights)
        tensors.statistics.copy_(statistics)
        tensors.write_read()

    @property
    def end(self) -> torch.Tensor:
        """A copy of the weights [total], in the order of `ParameterSpace`."""
        return self._layout.restored(torch.cat([self.tensors.weights, self.tensors.statistics]))

    def start(self, task: LocalTask) -> None:
        """Set all tensors but the plan, and the draws of the layers, to the start of a client's training."""
        proximal = task.proximal
        terms = {
            "mask": task.mask,
            "anchor": proximal.anchor if proximal else None,
            "correction": task.correction,
            "trainable": task.trainable,
            "frozen": task.weights if task.trainable is not None else None,
            "forward": task.forward,
        }
        vectors = {name: vector for name, vector in terms.items() if vector is not None}
        self._current = self._with(frozenset(vectors))
        for name, vector in vectors.items():
            target = self._vectors[name]
            target.copy_(self._layout.ordered(vector)[: len(target)])
        tensors = self._current.tensors
        tensors.rate.fill_(task.learning_rate)
        tensors.pull.fill_(task.learning_rate * proximal.strength if proximal else 0)
        tensors.loss_sum.zero_()
        if tensors.velocity is not None:
            tensors.velocity.zero_()
        self._place(task.weights, tensors)
        self._functions.eager.module.train()
        seed_layers(task.generator, self.plan.device)  # now, because a recording draws too

    def take(self, plan: torch.Tensor) -> None:
        """Take a step on each batch of a plan, int64 [steps, B, 1 + draws] on the CPU."""
        for part in plan.split(len(self.plan)):
            self.plan[: len(part)].copy_(sent(part, self.plan.device))
            self._next.zero_()
            if self._layout.statistics:
                self._take_each((part[:, :, 0] >= 0).sum(1).tolist())
                continue
            strides, rest = divmod(len(part), self._stride)
            for _ in range(strides):
                self._current.many()
            for _ in range(rest):
                self._current.one()

    def _take_each(self, sizes: list[int]) -> None:
        """Take the steps one by one. With BatchNorm no batch is filled up: filler rows would change its averages."""
        for place, size in enumerate(sizes):
            if size == len(self.part):
                self._current.one()
            else:
                self._functions.step(self._current.tensors, self.plan[place, :size])
                self._next.add_(1)
