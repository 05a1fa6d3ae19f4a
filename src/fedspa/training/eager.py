"""The eager engine: one client after another, one batch after another; the reference for every other engine."""

from __future__ import annotations

import logging

import torch
from lightning.fabric import Fabric
from torch import nn

from fedspa.core.client import Trained
from fedspa.core.randomness import seed_layers
from fedspa.core.settings import TrainingSettings
from fedspa.core.weights import ParameterSpace, whole
from fedspa.data.examples import Batch, Examples
from fedspa.kernels.building import CannotBuild
from fedspa.kernels.conv_pool import ConvPoolKernel
from fedspa.models.conv_pool import ConvPool
from fedspa.training.base import LocalTask
from fedspa.training.local_training import LocalTraining
from fedspa.training.objective import objective_for

log = logging.getLogger(__name__)


class EagerEngine:
    """Autograd, the module's own hooks and its optimizer on one network."""

    name = "eager"
    forks = True
    compile_seconds = 0.0

    def __init__(
        self, fabric: Fabric, network: nn.Module, settings: TrainingSettings, train: Examples
    ) -> None:
        """
        Args:
            fabric: gives device and precision; the network is not wrapped by it, since clients must never
                average gradients with each other.
            network: the model; moved to the device here and used for every client.
            settings: batch size, optimizer and clipping.
            train: the training examples on the device; their targets decide what the network is trained for.
        """
        self.fabric = fabric
        self.settings = settings
        self.space = ParameterSpace.of(network)
        self.module = LocalTraining(network.to(fabric.device), settings, objective_for(train))
        self.examples = train
        self.instead_of: dict[str, str] = {}

    @property
    def device(self) -> torch.device:
        """Where the network lies."""
        return self.fabric.device

    @property
    def weights(self) -> torch.Tensor:
        """A copy of the working network's flat weights [total]."""
        return self.module.vector.clone()

    def use_kernels(self) -> None:
        """Have the layers for which there is code of our own computed by it, if the machine can build that."""
        layers = [layer for layer in self.module.network.modules() if isinstance(layer, ConvPool)]
        if not layers:
            return
        try:
            kernel = ConvPoolKernel()
        except CannotBuild as error:
            log.warning(
                "The model's convolutions are computed by torch alone, which may be slower: %s.", error
            )
            self.instead_of["kernels"] = str(error)
            return
        for layer in layers:
            layer.kernel = kernel

    def train(self, task: LocalTask) -> Trained:
        """Train a client, batch after batch."""
        module, settings, generator = self.module, self.settings, task.generator
        module.begin(task)
        module.train()
        seed_layers(generator, self.device)
        optimizer = module.configure_optimizers()
        loss_sum = torch.zeros((), device=self.device, dtype=torch.float64)
        samples = 0
        for _ in range(task.epochs):
            for batch in self.examples.epoch(task.rows, settings.batch_size, generator, settings.drop_last):
                loss_sum += self._step(batch, optimizer) * len(batch.targets)
                samples += len(batch.targets)
        return Trained(self.weights, loss_sum / samples, samples)

    def gradient(self, weights: torch.Tensor, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The dense, unclipped gradient [total] of the mean loss of one mini-batch of `rows` (int64 [n])."""
        self.module.load(weights)
        self.module.train()
        seed_layers(generator, self.device)
        batch = next(self.examples.epoch(rows, self.settings.batch_size, generator))
        return whole(self._backward(batch)[1], self.space).clone()

    def accuracy(self, weights: torch.Tensor, rows: torch.Tensor) -> float:
        """The accuracy in [0, 1] of `weights` [total] on training rows (int64 [n]), without augmentation."""
        predicted = self.predict(weights, self.examples, rows, self.settings.batch_size)
        return self.examples.accuracy(predicted, rows)

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Dense gradient [total] of the mean loss over all `rows` (int64 [n]), without augmentation."""
        self.module.load(weights)
        self.module.eval()
        total = torch.zeros_like(weights)
        for batch in self.examples.in_order(rows, self.settings.batch_size):
            total[: self.space.trained] += self._backward(batch)[1] * (len(batch.targets) / len(rows))
        return total

    @torch.no_grad()
    def predict(
        self, weights: torch.Tensor, examples: Examples, rows: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        """The prediction for each example, [n] or [n, K], on the device; see `Engine.predict`."""
        module = self.module
        module.load(weights)
        module.eval()
        with self.fabric.autocast():
            predicted = [
                module.objective.predictions(module.network(batch.inputs))
                for batch in examples.in_order(rows, batch_size)
            ]
        return torch.cat(predicted)

    def _backward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of a batch and the flat gradient [trained], which the next call overwrites."""
        gradient = self.module.weights.grad
        assert gradient is not None
        gradient.zero_()
        with self.fabric.autocast():
            loss = self.module.training_step(batch)
        self.fabric.backward(loss)
        return loss.detach(), gradient

    def _step(self, batch: Batch, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        loss, _ = self._backward(batch)
        self.module.on_before_optimizer_step(optimizer)
        optimizer.step()
        self.module.on_train_batch_end(loss, batch)
        return loss
