"""The network as pure functions of flat weights, for the compiled engine; and its SGD step."""

from __future__ import annotations

import torch
from torch.func import functional_call, grad_and_value

from fedspa.core.settings import TrainingSettings
from fedspa.core.weights import ParameterSpace
from fedspa.data.examples import Batch, Examples
from fedspa.training.base import LocalTask
from fedspa.training.eager import EagerEngine


class Layout:
    """The order of flat vectors in the compiled engine: weights of convolutions are channels-last.

    Then one operation over a whole vector updates all weights, and convolutions read them without a copy.
    """

    def __init__(self, space: ParameterSpace, device: torch.device) -> None:
        self.space, self.trained, self.total = space, space.trained, space.total
        self.statistics = self.total - self.trained
        places = [
            piece.permute(0, 2, 3, 1).flatten() if piece.dim() == 4 else piece.flatten()
            for _, piece in space.items(torch.arange(self.total, dtype=torch.int32))
        ]
        order = torch.cat(places)
        self._order, self._back = order.to(device), order.argsort().to(device, torch.int32)

    def ordered(self, vector: torch.Tensor) -> torch.Tensor:
        """A copy of a vector [total] in this order."""
        return vector.index_select(0, self._order)

    def restored(self, vector: torch.Tensor) -> torch.Tensor:
        """A copy of a vector [total] of this order in the order of `ParameterSpace`."""
        return vector.index_select(0, self._back)

    def halves(self, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The parameters [trained] and running statistics [total - trained] of a vector [total], as views."""
        return vector[: self.trained], vector[self.trained :]

    def tensors(self, weights: torch.Tensor, statistics: torch.Tensor) -> dict[str, torch.Tensor]:
        """The network's tensors by name: views of vectors [trained] and [total - trained] of this order."""
        return {
            name: _view(piece, shape)
            for space, vector in ((self.space.parameters, weights), (self.space.running, statistics))
            for name, shape, piece in zip(space.names, space.shapes, space.split(vector), strict=True)
        }


def _view(piece: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if len(shape) != 4:
        return piece.view(shape)
    outputs, inputs, height, width = shape
    return piece.view(outputs, height, width, inputs).permute(0, 3, 1, 2)


class FlatNetwork:
    """The network of an engine as functions of weights [trained] and running statistics [total - trained].

    The vectors are in the order of the layout. With bf16-mixed all layers compute in bfloat16, on weights that
    were cast once. The loss and the running statistics are in single precision. The functions neither read nor change
    the network's own tensors.
    """

    def __init__(self, eager: EagerEngine) -> None:
        self.layout = Layout(eager.space, eager.device)
        self.dtype = _computing_dtype(eager)
        """The dtype of the weights in the forward pass."""
        self._exact = eager.examples.dtype
        norms = {_layer(name) for name in eager.space.running.names}
        self._exact_names = {name for name in eager.space.parameters.names if _layer(name) in norms}
        """The weights that BatchNorm takes in the dtype of its running statistics."""
        self._network, self._objective = eager.module.network, eager.module.objective
        self._differentiated = grad_and_value(self._loss, has_aux=True)

    def outputs(self, weights: torch.Tensor, statistics: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The network's outputs for inputs [B, ...]. In training mode layers write into the statistics."""
        if inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        tensors = self.layout.tensors(weights, statistics)
        tensors |= {name: tensors[name].to(self._exact) for name in self._exact_names}
        found: torch.Tensor = functional_call(self._network, tensors, (inputs,))
        return found.to(self._exact)

    def gradient(
        self, weights: torch.Tensor, statistics: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradient [trained] and the mean loss of a batch, and the running statistics after it."""
        gradient, (loss, after) = self._differentiated(weights, statistics, batch.inputs, batch.targets)
        return gradient, loss, after

    def _loss(
        self, weights: torch.Tensor, statistics: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        after = statistics.clone()
        return self._objective.loss(self.outputs(weights, after, inputs), targets), after


def _layer(name: str) -> str:
    """The layer of a tensor, by their names in the network."""
    return name.rpartition(".")[0]


def _computing_dtype(eager: EagerEngine) -> torch.dtype:
    kind = eager.device.type
    with eager.fabric.autocast():
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else eager.examples.dtype


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
