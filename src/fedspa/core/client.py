"""One client in one round: what its method may ask of it, and what the method gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from fedspa.core.client_state import ClientState
from fedspa.core.packed_mask import PackedMask
from fedspa.core.settings import TrainingSettings

if TYPE_CHECKING:
    import torch

    from fedspa.core.weights import ParameterSpace


class Diverged(Exception):
    """Training gave a number that is not finite. The message says which one.

    A method need not catch it: the client's update then counts as failed.
    """


@dataclass(frozen=True)
class Initial:
    """The start of a federation, from which a method makes the state of a new client."""

    weights: torch.Tensor
    """The initial global weights w_0 [total]."""
    mask: Callable[[int], PackedMask]
    """The first mask of a client: the same object for all clients that share it."""
    full_mask: PackedMask
    """The mask of a dense model."""


@dataclass(frozen=True, eq=False)
class Proximal:
    """A proximal term. After each step: v <- v - lr * strength * (v - anchor)."""

    anchor: torch.Tensor
    """Weights [total]."""
    strength: float
    """mu in FedProx, lambda in Ditto."""


@dataclass(frozen=True, eq=False)
class Trained:
    """The result of local training."""

    weights: torch.Tensor
    """[total]; nobody else writes to it."""
    loss: torch.Tensor
    """float64 scalar on the device of the weights: the mean over the samples; NaN where there are none."""
    samples: int
    """Samples trained on: epochs times rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientUpdate:
    """What a client sends to the server, and what it keeps."""

    update: torch.Tensor | None
    """U_k [total] = start - end, which the server averages and subtracts. None: no weights are sent."""
    mask: torch.Tensor | None = None
    """Zeros and ones [total]: the coordinates of the update that travel. None: all of them."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further tensors that travel to the server, by name; the server averages them with the same weights."""
    state: ClientState | None = None
    """The client's state until its next update. None: the state stays as it is."""
    local: torch.Tensor | None
    """The local model [total]: the client's weights right after its training. None: it has none."""


Trainable: TypeAlias = "Literal['all', 'shared', 'personal'] | torch.Tensor"
"""The layers to train: all, those that travel, those that stay with the client; or zeros and ones [total] over the
layers that travel, beside which those of the client stay as they are."""


class Client(Protocol):
    """One client in one round, as its method sees it.

    A method's code about a client is a function of this object alone: it keeps nothing elsewhere.
    """

    @property
    def id(self) -> int:
        """Which client this is, from 0."""

    @property
    def round(self) -> int:
        """The round, from 0."""

    @property
    def first(self) -> bool:
        """Whether the client has not completed any update yet."""

    @property
    def weights(self) -> torch.Tensor:
        """The global weights w_t [total] as the client received them; not to be written to."""

    @property
    def state(self) -> ClientState:
        """What the client remembers from its last update."""

    @property
    def mask(self) -> torch.Tensor:
        """The mask of the client's state: [total] zeros and ones in the dtype of the weights."""

    @property
    def space(self) -> ParameterSpace:
        """Where each tensor lies in a flat vector [total]."""

    @property
    def training(self) -> TrainingSettings:
        """The settings of local training."""

    @property
    def target_counts(self) -> Sequence[int]:
        """Active parameters of each tensor that the layer sparsity asks for; empty for a dense method."""

    def generator(self, purpose: str) -> torch.Generator:
        """The source of this client's random draws in this round, one for each purpose."""

    def train(
        self,
        weights: torch.Tensor,
        *,
        epochs: int | None = None,
        mask: torch.Tensor | None = None,
        proximal: Proximal | None = None,
        correction: torch.Tensor | None = None,
        trainable: Trainable = "all",
        batches: torch.Generator | None = None,
        personal: bool = False,
    ) -> Trained:
        """Train from `weights` [total] on the client's rows (paper, Eq. 3).

        Args:
            weights: already masked; not written to.
            epochs: passes over the rows; those of the settings unless given.
            mask: zeros and ones [total], fixed while training; None trains all parameters.
            proximal: a term that holds the weights near an anchor. Unless given, the config's `training.proximal` holds
                them near `weights`.
            correction: [total], added to every gradient after it was clipped; left out where the mask is 0.
            trainable: the layers that are trained. Nothing moves the others: no gradient, weight decay, momentum or
                running average.
            batches: draws the order of the rows; given where one training goes on from another.
            personal: the model is a personal one, which is trained beside the one whose update is sent.

        Raises:
            Diverged: the loss or the weights are not finite.
        """

    def gradient(self, weights: torch.Tensor, purpose: str) -> torch.Tensor:
        """The dense, unclipped gradient [total] of one mini-batch at `weights` [total]; 0 in running statistics.

        `purpose` keys the draw of the mini-batch. Raises `Diverged` where the gradient is not finite.
        """

    def accuracy(self, weights: torch.Tensor, mask: torch.Tensor | None = None) -> float:
        """The accuracy in [0, 1] of `weights` [total] on the client's training rows, without augmentation.

        `mask` [total]: where the weights are active, for the FLOPs.
        """

    def count(self, mask: torch.Tensor) -> tuple[int, ...]:
        """The active parameters of each tensor under a mask [total]."""

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Count the seconds of a block for a phase of the round, such as "search"."""
