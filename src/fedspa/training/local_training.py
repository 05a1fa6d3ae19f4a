"""Local training of a client: one masked SGD step, defined once for every engine."""

from __future__ import annotations

from typing import Any

import torch
from lightning import LightningModule
from torch import nn

from fedspa.core.settings import TrainingSettings
from fedspa.core.weights import bind
from fedspa.data.examples import Batch
from fedspa.training.base import LocalTask
from fedspa.training.objective import Classification, Objective
from fedspa.training.optimizers import make_optimizer


class LocalTraining(LightningModule):
    """The one working network that serves every client, and the step that trains it under a mask.

    The step is the paper's Eq. 3: w <- w - lr (m * clip(g) + weight_decay w), on the flat weights. An
    engine calls `training_step`, backward, `on_before_optimizer_step` (Fabric itself calls no hook) and the
    optimizer's step; engines without an optimizer object call `training_step` and `finish_gradient`.
    """

    def __init__(
        self, network: nn.Module, settings: TrainingSettings, objective: Objective | None = None
    ) -> None:
        """Take over a network that already lies on its device: its parameters become views of `weights`.

        objective: what it is trained for; classification unless given.
        """
        super().__init__()
        self.network = network
        self.settings = settings
        self.objective = objective or Classification()
        self.task: LocalTask | None = None
        """The training at work."""
        # In a tuple, because a module registers any parameter that it sees, and these are its own already.
        self._flat = bind(network)
        self.configure_optimizers()  # a mistake in the settings is found before training

    @property
    def weights(self) -> nn.Parameter:
        """The flat parameters [trained]; `.grad` is the flat gradient."""
        return self._flat[0]

    @property
    def vector(self) -> torch.Tensor:
        """The flat weights [total] of which `weights` is a view: the running statistics of BatchNorm lie behind it."""
        return self._flat[1]

    def load(self, weights: torch.Tensor) -> None:
        """Take weights [total]."""
        self.vector.copy_(weights)

    def begin(self, task: LocalTask) -> None:
        """Begin a client's training: take its weights, its learning rate, mask and other terms."""
        self.load(task.weights)
        self.task = task

    def training_step(self, batch: Batch, batch_idx: int = 0) -> torch.Tensor:
        """Mean loss of a batch, without what only fills it up; a scalar with a graph."""
        return self.objective.loss(self.network(batch.inputs), batch.targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """A fresh optimizer over the flat weights, as every client update gets."""
        lr = self.settings.lr if self.task is None else self.task.learning_rate
        return make_optimizer(self.settings, self.weights, lr)

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
        """After the step: apply the proximal term, and put back what the step must not move.

        That is what is frozen, running statistics too, and what the mask leaves out: an optimizer other than SGD may
        move it.
        """
        task = self.task
        assert task is not None
        if task.proximal is not None:
            anchor = task.proximal.anchor[: len(self.weights)]
            self.weights.lerp_(anchor, task.learning_rate * task.proximal.strength)
        if task.trainable is not None:
            self.vector.copy_(torch.where(task.trainable > 0, self.vector, task.weights))
        if task.mask is not None and self.settings.optimizer != "sgd":
            self.vector.copy_(torch.where(task.mask > 0, self.vector, task.weights))

    def finish_gradient(
        self,
        gradient: torch.Tensor,
        mask: torch.Tensor | None,
        correction: torch.Tensor | None = None,
        trainable: torch.Tensor | None = None,
    ) -> None:
        """Clip a gradient by its global norm, then mask it (the other way round with clip_scope=active), correct it.

        Weight decay is added later, by the optimizer: it is not part of the clipped norm, and it leaves
        masked weights at zero.

        Args:
            gradient: [trained]; changed in place.
            mask, trainable: zeros and ones, as long; None: all ones. Frozen coordinates do not count for the norm.
            correction: as long; None: nothing is added.
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
