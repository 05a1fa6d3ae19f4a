"""The engine: runs local training, dense gradients and predictions of any client on the working network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning.fabric import Fabric
from torch import nn

from fedspa.data.batches import Batch, Pixels
from fedspa.local_training import LocalTraining, Pull
from fedspa.settings import TrainingSettings
from fedspa.weights import ParameterSpace


@dataclass(frozen=True)
class Trained:
    """What local training leaves: weights [total], the mean loss over its samples, and how many they were."""

    weights: torch.Tensor
    loss: float
    samples: int


class EagerEngine:
    """One client after another, one batch after another: the reference for every other engine."""

    def __init__(self, fabric: Fabric, network: nn.Module, settings: TrainingSettings, train: Pixels) -> None:
        """
        Args:
            fabric: gives device and precision; the network is not wrapped by it, since clients must never
                average gradients with each other.
            network: the model; moved to the device here and used for every client.
            settings: batch size, optimizer and clipping.
            train: the training images on the device.
        """
        self.fabric = fabric
        self.settings = settings
        self.space = ParameterSpace.of(network)
        self._module = LocalTraining(network.to(fabric.device), settings)
        self._train = train

    @property
    def device(self) -> torch.device:
        """Where the network lies."""
        return self.fabric.device

    @property
    def weights(self) -> torch.Tensor:
        """A copy of the working network's flat weights [total]."""
        return self._module.weights.detach().clone()

    def train(
        self,
        weights: torch.Tensor,
        rows: torch.Tensor,
        *,
        epochs: int,
        learning_rate: float,
        generator: torch.Generator,
        mask: torch.Tensor | None = None,
        pull: Pull | None = None,
    ) -> Trained:
        """Train a client from given weights.

        Args:
            weights: [total], where training starts; already masked.
            rows: int64 [n] on the CPU, the client's training rows.
            epochs: passes over the rows.
            learning_rate: of every step.
            generator: draws the order of the rows and the augmentation; continued by later calls. Its seed is also
                that of layers which draw for themselves, such as dropout.
            mask: [total], zeros and ones in the dtype of the weights.
            pull: a proximal pull after each step.
        """
        module = self._module
        module.start(weights, learning_rate, mask, pull)
        module.train()
        torch.manual_seed(generator.initial_seed())
        optimizer = module.configure_optimizers()
        loss_sum = torch.zeros((), device=self.fabric.device, dtype=torch.float64)
        samples = 0
        for _ in range(epochs):
            batches = self._train.epoch(rows, self.settings.batch_size, generator, self.settings.drop_last)
            for batch in batches:
                loss_sum += self._step(batch, optimizer) * len(batch.labels)
                samples += len(batch.labels)
        mean_loss = float(loss_sum) / samples if samples else float("nan")
        return Trained(self.weights, mean_loss, samples)

    def gradient(self, weights: torch.Tensor, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Dense, unclipped gradient [total] of the mean loss of one mini-batch drawn from `rows`."""
        self._module.start(weights)
        self._module.train()
        torch.manual_seed(generator.initial_seed())
        batch = next(self._train.epoch(rows, self.settings.batch_size, generator))
        return self._backward(batch)[1].clone()

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Dense gradient [total] of the mean loss over all `rows` (int64 [n]), without augmentation."""
        self._module.start(weights)
        self._module.eval()
        total = torch.zeros_like(weights)
        for batch in self._train.in_order(rows, self.settings.batch_size):
            total += self._backward(batch)[1] * (len(batch.labels) / len(rows))
        return total

    @torch.no_grad()
    def predict(
        self, weights: torch.Tensor, pixels: Pixels, rows: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        """The most likely class of each image: int64 [n], on the device."""
        self._module.start(weights)
        self._module.eval()
        with self.fabric.autocast():
            classes = [
                self._module.network(batch.images).argmax(dim=1)
                for batch in pixels.in_order(rows, batch_size)
            ]
        return torch.cat(classes)

    def training_accuracy(self, weights: torch.Tensor, rows: torch.Tensor) -> float:
        """Accuracy, in [0, 1], of weights [total] on a client's training rows, without augmentation."""
        predicted = self.predict(weights, self._train, rows, self.settings.batch_size)
        return float((predicted == self._train.labels[rows.to(predicted.device)]).double().mean())

    def _backward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of a batch and the flat gradient, which the next call overwrites."""
        gradient = self._module.weights.grad
        assert gradient is not None
        gradient.zero_()
        with self.fabric.autocast():
            loss = self._module.training_step(batch)
        self.fabric.backward(loss)
        return loss.detach(), gradient

    def _step(self, batch: Batch, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        loss, _ = self._backward(batch)
        self._module.on_before_optimizer_step(optimizer)
        optimizer.step()
        self._module.on_train_batch_end(loss, batch)
        return loss
