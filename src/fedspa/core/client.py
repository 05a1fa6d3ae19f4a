"""One client in one round: the interface that a method calls, and the client update that it returns."""

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
    """Training gave a number that is not finite. The message names it.

    A method need not catch it. The client's update then counts as failed.
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
    public: tuple[int, int] = (0, 0)
    """The number of public rows, and of the network's outputs for each."""


@dataclass(frozen=True)
class Peers:
    """All clients of the federation. Some methods make a client's message from the states of others."""

    clients: int
    """The number of clients."""
    state_of: Callable[[int], ClientState]
    """The state of any client."""
    generator: torch.Generator
    """The source of random draws for this message."""


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
    """The weights [total]. Nothing else refers to them."""
    loss: torch.Tensor
    """The mean loss over the samples: float64 scalar on the device of the weights; NaN without samples."""
    samples: int
    """The number of samples trained on: epochs times rows."""
    steps: int = 0
    """The number of batches trained on."""
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The further tensors of `Client.train` after the method's own step changed them."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """A personal model of two weight vectors: alpha f(personal) + (1 - alpha) f(shared), where f are the outputs."""

    personal: torch.Tensor
    """Weights [total]."""
    shared: torch.Tensor
    """Weights [total]."""
    alpha: float
    """The weight of the personal model, in [0, 1]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientUpdate:
    """The message from a client to the server, and the state that stays with the client."""

    update: torch.Tensor | None
    """U_k [total] = start - end, which the server averages and subtracts. None: no weights are sent."""
    mask: torch.Tensor | None = None
    """Zeros and ones [total]: the coordinates of the update that travel. None: all of them."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further tensors that travel to the server, by name. The server averages them with the same weights."""
    state: ClientState | None = None
    """The client's state until its next update. None: the state does not change."""
    local: torch.Tensor | None
    """The local model [total]: the client's weights right after its training. None: there is no local model."""


Trainable: TypeAlias = "Literal['all', 'shared', 'personal'] | torch.Tensor"
"""The layers to train: all, the shared ones, the personal ones; or zeros and ones [total] over the shared layers, and
then the personal layers are not trained."""


class Client(Protocol):
    """One client in one round: the interface for a method.

    A method's client functions use this object and their arguments alone, and store nothing elsewhere.
    """

    @property
    def id(self) -> int:
        """The client's number, from 0."""

    @property
    def round(self) -> int:
        """The round, from 0."""

    @property
    def first(self) -> bool:
        """True if the client has not completed any update yet."""

    @property
    def weights(self) -> torch.Tensor:
        """The global weights w_t [total] that the client received. Read only."""

    @property
    def initial(self) -> torch.Tensor:
        """The initial global weights w_0 [total], which both sides know. Read only."""

    @property
    def state(self) -> ClientState:
        """The client's state after its last update."""

    @property
    def mask(self) -> torch.Tensor:
        """The mask of the client's state: [total] zeros and ones in the dtype of the weights."""

    @property
    def space(self) -> ParameterSpace:
        """The place of each tensor in a flat vector [total]."""

    @property
    def training(self) -> TrainingSettings:
        """The settings of local training."""

    def generator(self, purpose: str) -> torch.Generator:
        """The source of this client's random draws in this round, one for each purpose."""

    def train(
        self,
        weights: torch.Tensor,
        *,
        epochs: int | None = None,
        mask: torch.Tensor | None = None,
        forward: torch.Tensor | None = None,
        proximal: Proximal | None = None,
        correction: torch.Tensor | None = None,
        trainable: Trainable = "all",
        batches: torch.Generator | None = None,
        personal: bool = False,
        public: bool = False,
        others: Mapping[str, torch.Tensor] | None = None,
        further_passes: int = 0,
    ) -> Trained:
        """Train from `weights` [total] on the client's rows (paper, Eq. 3).

        Args:
            weights: already masked. Read only.
            epochs: the number of passes over the rows; None: that of the settings.
            mask: zeros and ones [total], fixed while training; None trains all parameters.
            forward: zeros and ones [total] within the mask: the weights that are active in the forward pass. The others
                count as 0 there, and are trained by the gradient there. None: the whole mask is active.
            proximal: a term that pulls the weights toward an anchor, within the mask. None: `training.proximal` of the
                config pulls them toward `weights`, or toward the start of the training that this one continues.
            correction: [total], added to every gradient after clipping, except where the mask is 0.
            trainable: the layers that are trained. The others do not change: they have no gradient, weight decay,
                momentum or running average.
            batches: draws the order of the rows; set it if one training continues another.
            personal: True for a personal model that is trained beside the model whose update is sent.
            public: True to train on the public rows, which all clients have, in place of the client's own.
            others: further tensors for a method's own step (`Method.training_class`), by name. The step may change
                copies of them, which are returned.
            further_passes: forward passes of such a step for each sample, beside those of plain training, which
                are 3 (a backward pass counts as 2). They are charged.

        Raises:
            Diverged: the loss or the weights are not finite. With queued work on a GPU nothing is raised, and the
                update fails at the end of the round.
        """

    def gradient(self, weights: torch.Tensor, purpose: str) -> torch.Tensor:
        """The dense, unclipped gradient [total] of one mini-batch at `weights` [total]; 0 in running statistics.

        `purpose` keys the draw of the mini-batch. Raises `Diverged` if the gradient is not finite.
        """

    def accuracy(self, weights: torch.Tensor, mask: torch.Tensor | None = None) -> float:
        """The accuracy in [0, 1] of `weights` [total] on the client's training rows, without augmentation.

        `mask` [total]: the active weights, for the FLOPs.
        """

    def outputs(self, weights: torch.Tensor) -> torch.Tensor:
        """The outputs [public rows, outputs] of the network with `weights` [total] for the public rows, without
        augmentation."""

    def count(self, mask: torch.Tensor) -> tuple[int, ...]:
        """The active parameters of each tensor under a mask [total]. For another mask than the client's it needs a
        `read`."""

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """A value on the CPU, for a decision of the method. On a GPU this waits until the value is computed."""

    def later(self, values: Sequence[torch.Tensor], action: Callable[..., None]) -> None:
        """Call `action(*values)` when they are known: at once, or on a GPU when the updates of the round are read.

        The action may raise an error. It must not change anything that the method uses later.
        """

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Count the seconds of a block for a phase of the round, such as "search"."""
