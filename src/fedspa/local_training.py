"""Local training of a client: one masked SGD step, defined once for every engine."""

from __future__ import annotations

from typing import Any

import torch
from lightning import LightningModule
from torch import nn

from fedspa.data.batches import Batch
from fedspa.rounds.requests import Pull
from fedspa.settings import TrainingSettings
from fedspa.weights import bind


class LocalTraining(LightningModule):
    """The one working network that serves every client, and the step that trains it under a mask.

    The step is the paper's Eq. 3: w <- w - lr (m * clip(g) + weight_decay w), on the flat weights. An
    engine calls `training_step`, backward, `on_before_optimizer_step` (Fabric itself calls no hook) and the
    optimizer's step; engines without an optimizer object call `training_step` and `clip_and_mask`.
    """

    def __init__(self, network: nn.Module, settings: TrainingSettings) -> None:
        """Take over a network that already lies on its device: its parameters become views of `weights`."""
        super().__init__()
        self.network = network
        self.settings = settings
        self.learning_rate = settings.lr
        self.mask: torch.Tensor | None = None
        """The client's mask [trained] in the dtype of the weights; None trains densely."""
        self.pull: Pull | None = None
        # In a tuple, because a module registers any parameter that it sees, and these are its own already.
        self._flat = bind(network)

    @property
    def weights(self) -> nn.Parameter:
        """The flat parameters [trained]; `.grad` is the flat gradient."""
        return self._flat[0]

    @property
    def vector(self) -> torch.Tensor:
        """The flat weights [total] of which `weights` is a view: the running statistics of BatchNorm lie behind it."""
        return self._flat[1]

    def start(
        self,
        weights: torch.Tensor,
        learning_rate: float = 0.0,
        mask: torch.Tensor | None = None,
        pull: Pull | None = None,
    ) -> None:
        """Begin a visit: take the client's weights [total] (already masked), learning rate, mask and pull."""
        self.vector.copy_(weights)
        self.learning_rate = learning_rate
        self.mask = mask if mask is None else mask[: len(self.weights)]
        self.pull = pull

    def training_step(self, batch: Batch, batch_idx: int = 0) -> torch.Tensor:
        """Mean cross-entropy of a batch, labels `IGNORED` left out; a scalar with a graph."""
        return nn.functional.cross_entropy(self.network(batch.images), batch.labels)

    def configure_optimizers(self) -> torch.optim.SGD:
        """A fresh SGD over the flat weights, as every visit gets; fused, it passes over them once a step."""
        return torch.optim.SGD(
            [self.weights],
            lr=self.learning_rate,
            momentum=self.settings.momentum,
            weight_decay=self.settings.weight_decay,
            fused=True,
        )

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip and mask the gradient."""
        gradient = self.weights.grad
        assert gradient is not None  # bind() made it
        self.clip_and_mask(gradient, self.mask)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int = 0) -> None:
        """After the step: pull the weights towards the anchor, where the visit has one."""
        if self.pull is not None:
            anchor = self.pull.anchor[: len(self.weights)]
            self.weights.lerp_(anchor, self.learning_rate * self.pull.strength)

    def clip_and_mask(self, gradient: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Clip gradients by their global norm, then mask them (the other way round with clip_scope=active).

        Weight decay is added later, by the optimizer: it is not part of the clipped norm, and it leaves
        masked weights at zero.

        Args:
            gradient: [trained], or [clients, trained] of clients that advance together; changed in place.
            mask: zeros and ones, as long; None for dense training.
        """
        if mask is not None and self.settings.clip_scope == "active":
            gradient.mul_(mask)
        if self.settings.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
            gradient.mul_((self.settings.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if mask is not None and self.settings.clip_scope == "all":
            gradient.mul_(mask)
