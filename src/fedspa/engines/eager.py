"""The eager engine: one client after another, one batch after another; the reference for every other engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from lightning.fabric import Fabric
from torch import nn

from fedspa.data.batches import Batch, Pixels
from fedspa.kernels.building import CannotBuild
from fedspa.kernels.conv_pool import ConvPoolKernel
from fedspa.local_training import LocalTraining
from fedspa.masks.checking import found_masks
from fedspa.models.conv_pool import ConvPool
from fedspa.randomness import seed_layers
from fedspa.rounds.requests import (
    Answer,
    Gradient,
    NextMask,
    Predict,
    Request,
    Train,
    Trained,
    TrainingAccuracy,
)
from fedspa.settings import TrainingSettings
from fedspa.weights import ParameterSpace, whole

log = logging.getLogger(__name__)


class EagerEngine:
    """Autograd, the module's own hooks and its optimizer on one network."""

    name = "eager"
    clients_at_once = 1
    compile_seconds = 0.0

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
        self.module = LocalTraining(network.to(fabric.device), settings)
        self.pixels = train
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

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """One request after another."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Answer:
        match request:
            case Train():
                return self._trained(request)
            case Gradient():
                return self._gradient(request)
            case NextMask():
                return found_masks(request.searcher, [request.search])[0]
            case TrainingAccuracy():
                predicted = self.predict(request.weights, self.pixels, request.rows, self.settings.batch_size)
                return self.accuracy(request, predicted)
            case Predict():
                return self.predict(request.weights, request.pixels, request.rows, request.batch_size)

    def _trained(self, request: Train) -> Trained:
        module, settings, generator = self.module, self.settings, request.generator
        module.start(request.weights, request.learning_rate, request.mask, request.pull)
        module.train()
        seed_layers(generator, self.device)
        optimizer = module.configure_optimizers()
        loss_sum = torch.zeros((), device=self.device, dtype=torch.float64)
        samples = 0
        for _ in range(request.epochs):
            for batch in self.pixels.epoch(request.rows, settings.batch_size, generator, settings.drop_last):
                loss_sum += self._step(batch, optimizer) * len(batch.labels)
                samples += len(batch.labels)
        return Trained(self.weights, loss_sum / samples, samples)

    def _gradient(self, request: Gradient) -> torch.Tensor:
        self.module.start(request.weights)
        self.module.train()
        seed_layers(request.generator, self.device)
        batch = next(self.pixels.epoch(request.rows, self.settings.batch_size, request.generator))
        return whole(self._backward(batch)[1], self.space).clone()

    def accuracy(self, request: TrainingAccuracy, predicted: torch.Tensor) -> float:
        """The answer to a request, from the classes predicted (int64 [n])."""
        return float((predicted.cpu() == self.pixels.labels_of(request.rows)).double().mean())

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Dense gradient [total] of the mean loss over all `rows` (int64 [n]), without augmentation."""
        self.module.start(weights)
        self.module.eval()
        total = torch.zeros_like(weights)
        for batch in self.pixels.in_order(rows, self.settings.batch_size):
            total[: self.space.trained] += self._backward(batch)[1] * (len(batch.labels) / len(rows))
        return total

    @torch.no_grad()
    def predict(
        self, weights: torch.Tensor, pixels: Pixels, rows: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        """The most likely class of each image: int64 [n], on the device."""
        self.module.start(weights)
        self.module.eval()
        with self.fabric.autocast():
            classes = [
                self.module.network(batch.images).argmax(dim=1) for batch in pixels.in_order(rows, batch_size)
            ]
        return torch.cat(classes)

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
