"""The interface of an engine. An engine computes on the network: local training, gradients, predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from fedspa.core.client import Mixture, Proximal, Trained
from fedspa.core.weights import ParameterSpace
from fedspa.data.examples import Examples

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalTask:
    """Local training of one client."""

    weights: torch.Tensor
    """The weights [total] that training starts from, already masked. Read only."""
    rows: torch.Tensor
    """int64 [n] on the CPU: the client's training rows."""
    epochs: int
    """The number of passes over the rows."""
    learning_rate: float
    """The learning rate of every step."""
    generator: torch.Generator
    """Draws the order of the rows and the augmentation. Its seed also serves layers that draw random numbers,
    such as dropout."""
    mask: torch.Tensor | None = None
    """Zeros and ones [total] in the dtype of the weights; None trains densely."""
    forward: torch.Tensor | None = None
    """Zeros and ones [total] within the mask: the weights that are active in the forward pass; None: the whole mask.
    The others are 0 in the forward pass, and are trained by the gradient there."""
    proximal: Proximal | None = None
    correction: torch.Tensor | None = None
    """A vector [total] that is added to every gradient after clipping, except where the mask is 0."""
    trainable: torch.Tensor | None = None
    """Zeros and ones [total]: a coordinate that is 0 here never changes; None: all are trained."""
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further tensors for a method's own step, by name. Read only."""


class Engine(Protocol):
    """Computes on one network for all clients. A result depends on the arguments alone."""

    @property
    def name(self) -> str:
        """The name in the config."""

    instead_of: dict[str, str]
    """The engines that failed before this one was chosen, and the reason for each."""

    @property
    def forks(self) -> bool:
        """True if forks of this process can compute at the same time."""

    @property
    def compile_seconds(self) -> float:
        """The seconds of compiling and capturing before the first round."""

    @property
    def lanes(self) -> int:
        """The number of lanes in which clients are trained side by side, while nobody waits for the device.

        0: each call computes its result at once.
        """

    def in_lanes(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """The results of functions. They run in the lanes in turn, and later work waits for all of them."""

    @property
    def space(self) -> ParameterSpace:
        """The place of each parameter tensor in the flat weights."""

    @property
    def device(self) -> torch.device:
        """The device of the network."""

    @property
    def weights(self) -> torch.Tensor:
        """A copy of the working network's flat weights [total]."""

    def train(self, task: LocalTask) -> Trained:
        """Train a client. The result is not checked for finite numbers."""

    def gradient(self, weights: torch.Tensor, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The dense, unclipped gradient [total] of the mean loss of one mini-batch of `rows` (int64 [n])."""

    def accuracy(self, weights: torch.Tensor, rows: torch.Tensor) -> float:
        """The accuracy in [0, 1] of `weights` [total] on training rows (int64 [n]), without augmentation."""

    def outputs(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The network's outputs [n, K] for training rows (int64 [n]), at `weights` [total], without augmentation."""

    def predict(
        self, weights: torch.Tensor | Mixture, examples: Examples, rows: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        """The prediction for each example, on the device: its most likely class int64 [n], or numbers float [n, K].

        Args:
            weights: [total], or a mixture of two models. Read only.
            examples: the set that the rows belong to.
            rows: int64 [n] on the CPU or the device: at least one example.
            batch_size: the largest number of examples in one forward pass.
        """

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The dense gradient [total] of the mean loss over all `rows` (int64 [n]), without augmentation."""
