"""Local training of a client: one masked SGD step, defined once for all engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning import LightningModule
from torch import nn

from fedspa.core.errors import UserError
from fedspa.core.settings import TrainingSettings
from fedspa.core.weights import ParameterSpace, bind
from fedspa.data.examples import Batch
from fedspa.training.base import LocalTask
from fedspa.training.objective import Classification, Objective
from fedspa.training.optimizers import make_optimizer


class LocalTraining(LightningModule):
    """The network that serves every client, and the step that trains it under a mask.

    The step is the paper's Eq. 3: w <- w - lr (m * clip(g) + weight_decay w), on the flat weights. An
    engine calls `step_on`, which calls Lightning's hooks (Fabric itself calls none); engines without an optimizer
    object call `training_step` and `finish_gradient`.

    A method with its own loss or step derives from this class. A user's network may be a LightningModule itself:
    its `training_step((inputs, targets), batch_idx)` then returns the loss, its `configure_optimizers` the optimizer.
    Both need the eager engine. Parameters outside the mask and frozen parameters never change.
    """

    def __init__(
        self, network: nn.Module, settings: TrainingSettings, objective: Objective | None = None
    ) -> None:
        """Take over a network that is already on its device. Its parameters become views of `weights`.

        `objective`: the objective of the training; classification by default.
        """
        super().__init__()
        self.network = network
        self.settings = settings
        self.objective = objective or Classification()
        self.method: Any = None
        """The method of the run."""
        self.task: LocalTask | None = None
        """The current training; None while only a gradient is computed."""
        self.others: dict[str, torch.Tensor] = {}
        """Copies of the task's further tensors, which a method's own step may change."""
        # In a tuple, because a module registers every parameter attribute, and these belong to the network already.
        self._flat = bind(network)
        self.space = ParameterSpace.of(network)
        self._all_weights = torch.empty(0)
        """All weights [trained], while the network has only those of `LocalTask.forward`."""
        self._network_steps = _brings(network, "training_step")
        self._network_optimizes = _brings(network, "configure_optimizers")
        self.configure_optimizers()  # reports a mistake in the settings before training

    @property
    def weights(self) -> nn.Parameter:
        """The flat parameters [trained]; `.grad` is the flat gradient."""
        return self._flat[0]

    @property
    def vector(self) -> torch.Tensor:
        """The flat weights [total]: `weights` is a view of their beginning, BatchNorm's running statistics follow."""
        return self._flat[1]

    @property
    def own_step(self) -> str:
        """The name of the class with its own loss, step or optimizer; "" if this class provides all of them."""
        if type(self) is not LocalTraining:
            return type(self).__name__
        return type(self.network).__name__ if self._network_steps or self._network_optimizes else ""

    def load(self, weights: torch.Tensor) -> None:
        """Copy weights [total] into the network."""
        self.vector.copy_(weights)

    def look_at(self, weights: torch.Tensor) -> None:
        """Copy weights [total] into the network to compute a gradient outside of any client's training."""
        self.load(weights)
        self.task, self.others = None, {}

    def begin(self, task: LocalTask) -> None:
        """Begin a client's training: set its weights, learning rate, mask and other terms."""
        self.load(task.weights)
        self.task, self.others = task, {name: tensor.clone() for name, tensor in task.others.items()}

    def training_step(self, batch: Batch, batch_idx: int = 0) -> torch.Tensor:
        """The mean loss of a batch without filler rows: a scalar with a graph."""
        if self._network_steps:
            found: Any = self.network.training_step((batch.inputs, batch.targets), batch_idx)  # type: ignore[operator]
            return found["loss"] if isinstance(found, Mapping) else found
        return self.objective.loss(self.network(batch.inputs), batch.targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """A fresh optimizer over the flat weights. Every client update gets one.

        Raises `UserError` if the network's own `configure_optimizers` returns anything but one optimizer.
        """
        if self._network_optimizes:
            own = self.network.configure_optimizers()  # type: ignore[operator]
            if not isinstance(own, torch.optim.Optimizer):
                raise UserError(
                    f"configure_optimizers of {type(self.network).__name__} gives {type(own).__name__}: it must give "
                    "one torch optimizer, for a schedule would begin anew at each client update."
                )
            return own
        lr = self.settings.lr if self.task is None else self.task.learning_rate
        return make_optimizer(self.settings, self.weights, lr)

    def step_on(
        self, batch: Batch, optimizer: torch.optim.Optimizer, backward: Callable[[Batch], torch.Tensor]
    ) -> torch.Tensor:
        """Take one step on a batch. `backward` computes the loss and leaves its gradient. Returns the loss."""
        self.on_train_batch_start(batch)
        loss = backward(batch)
        self.on_after_backward()
        self.on_before_optimizer_step(optimizer)
        optimizer.step()
        self.on_train_batch_end(loss, batch)
        return loss

    @torch.no_grad()
    def on_train_batch_start(self, batch: Batch, batch_idx: int = 0) -> None:
        """Before the forward pass: set weights outside the forward mask to 0."""
        if self.task is not None and self.task.forward is not None:
            self._all_weights = self.weights.clone()
            self.weights.mul_(self.task.forward[: len(self.weights)])

    @torch.no_grad()
    def on_after_backward(self) -> None:
        """Restore all weights for the step."""
        if self.task is not None and self.task.forward is not None:
            self.weights.copy_(self._all_weights)

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip, mask and correct the gradient."""
        gradient, task = self.weights.grad, self.task
        assert gradient is not None and task is not None  # bind() made the gradient, begin() took the task
        trained = len(gradient)
        mask, correction, trainable = (
            vector if vector is None else vector[:trained]
            for vector in (task.mask, task.correction, task.trainable)
        )
        self.finish_gradient(gradient, mask, correction, trainable)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int = 0) -> None:
        """After the optimizer's step: apply the proximal term."""
        task = self.task
        assert task is not None
        if task.proximal is not None:
            anchor = task.proximal.anchor[: len(self.weights)]
            self.weights.lerp_(anchor, task.learning_rate * task.proximal.strength)

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the coordinates that a step must not change.

        These are frozen ones, also in running statistics, and those outside the mask. SGD does not move the latter, but
        another optimizer may.
        """
        task = self.task
        assert task is not None
        if task.trainable is not None:
            self.vector.copy_(torch.where(task.trainable > 0, self.vector, task.weights))
        if task.mask is not None and (self.settings.optimizer != "sgd" or self.own_step):
            self.vector.copy_(torch.where(task.mask > 0, self.vector, task.weights))

    def finish_gradient(
        self,
        gradient: torch.Tensor,
        mask: torch.Tensor | None,
        correction: torch.Tensor | None = None,
        trainable: torch.Tensor | None = None,
    ) -> None:
        """Clip a gradient by its global norm, mask it, and correct it. With clip_scope=active the mask comes first.

        The optimizer adds weight decay later. So it is not part of the clipped norm, and masked weights stay at zero.

        Args:
            gradient: [trained]; it is changed in place.
            mask, trainable: zeros and ones [trained]; None: all ones. Frozen coordinates do not count for the norm.
            correction: [trained]; None: nothing is added.
        """
        if trainable is not None:
            gradient.mul_(trainable)
        if mask is not None and self.settings.clip_scope == "active":
            gradient.mul_(mask)
        if self.settings.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
            gradient.mul_((self.settings.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if mask is not None and self.settings.clip_scope == "all":
            gradient.mul_(mask)
        if correction is not None:
            gradient.add_(correction if mask is None else correction * mask)


def _brings(network: nn.Module, hook: str) -> bool:
    """True if a network is a LightningModule that defines this hook."""
    return isinstance(network, LightningModule) and getattr(type(network), hook) is not getattr(
        LightningModule, hook
    )
