"""The eager engine: one client after another, one batch after another; the reference for every other engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from lightning.fabric import Fabric
from torch import nn

from fedspa.core.client import Mixture, Trained
from fedspa.core.randomness import seed_layers
from fedspa.core.settings import TrainingSettings
from fedspa.core.weights import ParameterSpace, whole
from fedspa.data.examples import Batch, Examples
from fedspa.kernels.building import CannotBuild
from fedspa.kernels.conv_pool import ConvPoolKernel
from fedspa.models.conv_pool import ConvPool
from fedspa.training.base import LocalTask
from fedspa.training.local_training import LocalTraining
from fedspa.training.objective import Objective, objective_for

log = logging.getLogger(__name__)
T = TypeVar("T")


class EagerEngine:
    """Trains one network with autograd, the module's hooks and its optimizer."""

    name = "eager"
    forks = True
    lanes = 0
    compile_seconds = 0.0

    def __init__(
        self,
        fabric: Fabric,
        network: nn.Module,
        settings: TrainingSettings,
        train: Examples,
        module: Callable[[nn.Module, TrainingSettings, Objective], LocalTraining] = LocalTraining,
    ) -> None:
        """
        Args:
            fabric: sets device and precision. It does not wrap the network, because clients must never average
                gradients with each other.
            network: the model. It is moved to the device here, and serves every client.
            settings: batch size, optimizer and clipping.
            train: the training examples on the device. Their targets decide the objective of the training.
            module: makes the module that trains the network.
        """
        self.fabric = fabric
        self.settings = settings
        self.space = ParameterSpace.of(network)
        self.module = module(network.to(fabric.device), settings, objective_for(train))
        self.examples = train
        self.instead_of: dict[str, str] = {}

    def in_lanes(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """The results of functions, one after another."""
        return [work() for work in works]

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.fabric.device

    @property
    def weights(self) -> torch.Tensor:
        """A copy of the working network's flat weights [total]."""
        return self.module.vector.clone()

    def use_kernels(self) -> None:
        """Use fedspa's C code for layers that it supports, if the machine can build it."""
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
        samples = steps = 0
        for _ in range(task.epochs):
            for batch in self.examples.epoch(task.rows, settings.batch_size, generator, settings.drop_last):
                loss_sum += self._step(batch, optimizer) * len(batch.targets)
                samples += len(batch.targets)
                steps += 1
        return Trained(self.weights, loss_sum / samples, samples, steps, module.others)

    def gradient(self, weights: torch.Tensor, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The dense, unclipped gradient [total] of the mean loss of one mini-batch of `rows` (int64 [n])."""
        self.module.look_at(weights)
        self.module.train()
        seed_layers(generator, self.device)
        batch = next(self.examples.epoch(rows, self.settings.batch_size, generator))
        return whole(self._backward(batch)[1], self.space).clone()

    def accuracy(self, weights: torch.Tensor, rows: torch.Tensor) -> float:
        """The accuracy in [0, 1] of `weights` [total] on training rows (int64 [n]), without augmentation."""
        predicted = self.predict(weights, self.examples, rows, self.settings.batch_size)
        return self.examples.accuracy(predicted, rows)

    @torch.no_grad()
    def outputs(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The network's outputs [n, K] for training rows (int64 [n]), at `weights` [total], without augmentation."""
        return self._outputs(weights, self.examples, rows, self.settings.batch_size)

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Dense gradient [total] of the mean loss over all `rows` (int64 [n]), without augmentation."""
        self.module.look_at(weights)
        self.module.eval()
        total = torch.zeros_like(weights)
        for batch in self.examples.in_order(rows, self.settings.batch_size):
            total[: self.space.trained] += self._backward(batch)[1] * (len(batch.targets) / len(rows))
        return total

    @torch.no_grad()
    def predict(
        self, weights: torch.Tensor | Mixture, examples: Examples, rows: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        """The prediction for each example, [n] or [n, K], on the device; see `Engine.predict`."""
        if isinstance(weights, Mixture):
            outputs = torch.lerp(
                self._outputs(weights.shared, examples, rows, batch_size),
                self._outputs(weights.personal, examples, rows, batch_size),
                weights.alpha,
            )
        else:
            outputs = self._outputs(weights, examples, rows, batch_size)
        return self.module.objective.predictions(outputs)

    def _outputs(
        self, weights: torch.Tensor, examples: Examples, rows: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        """The network's outputs for each example, with weights [total]."""
        module = self.module
        module.load(weights)
        module.eval()
        with self.fabric.autocast():
            return torch.cat([module.network(batch.inputs) for batch in examples.in_order(rows, batch_size)])

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
        loss = self.module.step_on(batch, optimizer, lambda batch: self._backward(batch)[0])
        self.module.put_back()
        return loss
