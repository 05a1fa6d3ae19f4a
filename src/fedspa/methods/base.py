"""A federated method: the state and the update of a client, and the kinds of model that it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedspa.core.client import Client, ClientUpdate, Initial
from fedspa.core.client_state import NOTHING, ClientState
from fedspa.core.errors import check_choice
from fedspa.core.server import Aggregate, ServerState
from fedspa.core.settings import TrainingSettings
from fedspa.masks.base import MaskSearcher
from fedspa.server_optimizers.base import ServerOptimizer
from fedspa.server_optimizers.sgd import ServerSGD

if TYPE_CHECKING:
    import torch


class Parts:
    """Groups of the config that a method uses beside its own options; set when the run is planned."""

    server_optimizer: ServerOptimizer = ServerSGD(name="sgd")
    searcher: MaskSearcher
    """Of methods with `uses_mask` only."""


@dataclass(kw_only=True)
class Method(Parts, ABC):
    """A federated method: plain code about one client, and about the server."""

    name: str
    weighting: str
    """a_k: the same for all participants (uniform) or proportional to their training rows (samples)."""
    normaliser: str = "participants"
    """The divisor of a coordinate: the weight of all participants, or of those whose mask holds it (holders)."""

    kinds: ClassVar[tuple[str, ...]]
    """The kinds of model that the method has: of global, personal and local."""
    personal_is_own: ClassVar[bool] = False
    """Whether the personal model depends on the client's state alone: between two updates it stays the same."""
    trains_personal: ClassVar[bool] = False
    """Whether its clients train a personal model beside the one whose update is sent (`train(..., personal=True)`)."""
    sends: ClassVar[bool] = True
    """Whether its clients and the server send each other anything; else there is no server's model."""
    prepares: ClassVar[bool] = False
    """Whether all clients send something before round 1 (`client_prepare`)."""
    uses_mask: ClassVar[bool] = False
    """Whether it needs a mask searcher."""
    uses_sparsity: ClassVar[bool] = False
    """Whether `sparsity` means anything to it."""

    def __post_init__(self) -> None:
        check_choice("method.weighting", self.weighting, ("uniform", "samples"))
        check_choice("method.normaliser", self.normaliser, ("participants", "holders"))

    def check_training(self, training: TrainingSettings) -> None:  # noqa: B027 (most methods have nothing to say)
        """Raise `UserError` where these settings make no sense to the method."""

    def weight(self, rows: int) -> float:
        """a_k of a client with so many training rows, up to the normalisation."""
        return float(rows) if self.weighting == "samples" else 1.0

    def client_init(self, client: int, initial: Initial) -> ClientState:
        """The state of a new client; made of the same objects for all clients where it is the same.

        A function of the arguments alone: clients that never took part are tested by it too.
        """
        return NOTHING

    def client_start(self, client: Client, server: ServerState) -> ClientState:
        """The state of a new client after it received the weights for the first time."""
        return client.state

    def client_prepare(self, client: Client, server: ServerState) -> ClientUpdate:
        """What a client sends before round 1, of methods with `prepares`: an update without weights."""
        raise NotImplementedError(f"{self.name} prepares nothing")

    def server_prepare(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """The server before round 1, from the means of what all clients sent."""
        return server

    def message(
        self, server: ServerState, client: int, state_of: Callable[[int], ClientState]
    ) -> ServerState:
        """What a participant is sent in a round, where it differs by client; `server` itself where it does not.

        `state_of` gives the state of any client, for methods whose clients hear from each other.
        """
        return server

    @abstractmethod
    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        """The client's side of a round: a function of the arguments alone."""

    def server_init(self, initial: Initial) -> ServerState:
        """The server before round 1."""
        return ServerState(initial.weights, kept=self.server_optimizer.moments(initial.weights))

    def server_update(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """The server's side of a round: w_{t+1} = w_t - sum a_k U_k (paper, Eq. 4) unless the optimizer is another."""
        return self.server_optimizer.step(server, aggregate)

    @property
    def finds_first_mask(self) -> bool:
        """Whether `client_start` finds a client's first mask, so that the client receives the dense weights."""
        return False

    def personal(self, weights: torch.Tensor, state: ClientState) -> torch.Tensor:
        """The personal model [total] of a client, from the global weights [total] and its state."""
        raise NotImplementedError(f"{self.name} has no personal model")

    def describe(self, round: int) -> dict[str, float]:
        """Quantities of a round (from 0) worth logging, by name; the same names in every round."""
        return {}


class MaskedMethod(Method):
    """A method whose clients have masks that a searcher finds."""

    uses_mask: ClassVar[bool] = True
    uses_sparsity: ClassVar[bool] = True

    @property
    def finds_first_mask(self) -> bool:
        return self.searcher.searches_first

    def describe(self, round: int) -> dict[str, float]:
        return self.searcher.describe(round)
