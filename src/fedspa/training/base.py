"""An engine holds the working network and computes on it: local training, gradients, predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from fedspa.core.client import Proximal, Trained
from fedspa.core.weights import ParameterSpace
from fedspa.data.examples import Examples


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalTask:
    """Local training of one client."""

    weights: torch.Tensor
    """[total], where training starts, already masked; not written to."""
    rows: torch.Tensor
    """int64 [n] on the CPU: the client's training rows."""
    epochs: int
    """Passes over the rows."""
    learning_rate: float
    """Of every step."""
    generator: torch.Generator
    """Draws the order of the rows and the augmentation. Its seed is also that of layers that draw random numbers,
    such as dropout."""
    mask: torch.Tensor | None = None
    """[total], zeros and ones in the dtype of the weights; None trains densely."""
    proximal: Proximal | None = None
    correction: torch.Tensor | None = None
    """[total], added to every gradient after it was clipped; where the mask is 0 it is left out."""
    trainable: torch.Tensor | None = None
    """[total], zeros and ones: nothing moves a coordinate that is 0 here; None: all are trained."""


class Engine(Protocol):
    """Computes on one network that serves every client. A result depends on the arguments alone."""

    @property
    def name(self) -> str:
        """As in the config."""

    instead_of: dict[str, str]
    """What was to compute before this engine was taken, and why each of them could not; mostly empty."""

    @property
    def forks(self) -> bool:
        """Whether forks of this process can compute side by side."""

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling and capturing before the first round."""

    @property
    def space(self) -> ParameterSpace:
        """Where each parameter tensor lies in the flat weights."""

    @property
    def device(self) -> torch.device:
        """The device of the network."""

    @property
    def weights(self) -> torch.Tensor:
        """A copy of the working network's flat weights [total]."""

    def train(self, task: LocalTask) -> Trained:
        """Train a client. Nothing is checked for finite numbers."""

    def gradient(self, weights: torch.Tensor, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The dense, unclipped gradient [total] of the mean loss of one mini-batch of `rows` (int64 [n])."""

    def accuracy(self, weights: torch.Tensor, rows: torch.Tensor) -> float:
        """The accuracy in [0, 1] of `weights` [total] on training rows (int64 [n]), without augmentation."""

    def predict(
        self, weights: torch.Tensor, examples: Examples, rows: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        """The prediction for each example, on the device: its most likely class, int64 [n], or numbers, float [n, K].

        Args:
            weights: [total]; not written to.
            examples: the set that the rows are of.
            rows: int64 [n] on the CPU: at least one example.
            batch_size: the most examples that the network sees at a time.
        """

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The dense gradient [total] of the mean loss over all `rows` (int64 [n]), without augmentation."""
