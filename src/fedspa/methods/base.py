"""The base class of federated methods: a client's state and update, the server's update, and the kinds of model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedspa.core.client import Client, ClientUpdate, Initial, Mixture, Peers
from fedspa.core.client_state import NOTHING, ClientState
from fedspa.core.limits import Component, limited
from fedspa.core.server import Aggregate, ServerState
from fedspa.core.settings import TrainingSettings
from fedspa.masks.base import MaskSearcher
from fedspa.server_optimizers.base import ServerOptimizer
from fedspa.server_optimizers.sgd import ServerSGD

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fedspa.training.local_training import LocalTraining
    from fedspa.training.objective import Objective


class Parts:
    """Groups of the config that a method uses beside its own options. The plan of a run sets them."""

    server_optimizer: ServerOptimizer = ServerSGD(name="sgd")
    searcher: MaskSearcher
    """Only in methods with `uses_mask`."""


@dataclass(kw_only=True)
class Method(Parts, Component, ABC):
    """A federated method: functions of one client, and of the server."""

    section: ClassVar[str] = "method"
    weighting: str = limited("samples", choices=("uniform", "samples"))
    """a_k: the same for all participants (uniform), or proportional to their training rows (samples)."""
    normaliser: str = limited("participants", choices=("participants", "holders"))
    """The divisor of a coordinate: the weight of all participants, or of those whose mask has it (holders)."""

    label: ClassVar[str]
    """The spelling in print, where the name of the class has another one. Not inherited."""
    personal_is_own: ClassVar[bool] = False
    """True if the personal model depends on the client's state alone. Between two updates it then stays the same."""
    trains_personal: ClassVar[bool] = False
    """True if clients train a personal model beside the one whose update is sent (`train(..., personal=True)`)."""
    sends: ClassVar[bool] = True
    """True if clients and server exchange messages. False: there is no global model."""
    sends_weights: ClassVar[bool] = True
    """True if weights travel. False: only further tensors do (`ServerState.tensors`, `ClientUpdate.tensors`)."""
    needs_public: ClassVar[bool] = False
    """True if the method needs public rows (`dataset.public_fraction`)."""
    uses_mask: ClassVar[bool] = False
    """True if the method needs a mask searcher."""
    starts_dense: ClassVar[bool] = False
    """True if clients start with all weights and send fewer later on. Only a run shows how many."""
    shares_mask: ClassVar[bool] = False
    """True if the server keeps one mask for all clients, so that the global model is sparse."""
    mask_prunes: ClassVar[bool] = True
    """True if the mask of a client's state prunes its model. False: it only selects the weights that travel."""
    needs_accuracy: ClassVar[bool] = False
    """True if clients decide by an accuracy, which a regression does not have."""
    needs_personal_layers: ClassVar[bool] = False
    """True if the method needs `personal_layers`."""
    own_proximal: ClassVar[str] = ""
    """The option for the strength of the method's proximal term, in place of `training.proximal`."""
    moves_weights: ClassVar[bool] = False
    """True if the method's rule changes the global weights, without the server optimizer."""
    uses_sparsity: ClassVar[bool] = False
    """True if the method uses `sparsity`."""
    training_class: ClassVar[type | None] = None
    """The subclass of `LocalTraining` that trains clients, if the method has another loss or step. It needs the eager
    engine."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of model that the method has: some of global, personal and local."""
        has = {
            "global": self.sends and self.sends_weights,
            "personal": type(self).personal is not Method.personal,
            "local": True,
        }
        return tuple(kind for kind, there in has.items() if there)

    def check_training(self, training: TrainingSettings) -> None:  # noqa: B027 (most methods have nothing to say)
        """Raise `UserError` if the method cannot work with these settings."""

    def check_clients(self, clients: int) -> None:  # noqa: B027 (most methods take any)
        """Raise `UserError` if the method makes no sense in a federation of so many clients."""

    def check_mask(self, searcher: MaskSearcher) -> None:  # noqa: B027 (most methods take any)
        """Raise `UserError` if the method cannot work with this mask searcher."""

    def training_module(
        self, network: nn.Module, settings: TrainingSettings, objective: Objective
    ) -> LocalTraining:
        """The LightningModule that trains clients."""
        from fedspa.training.local_training import LocalTraining

        module = (self.training_class or LocalTraining)(network, settings, objective)
        module.method = self
        return module

    @property
    def prepares(self) -> bool:
        """True if all clients send tensors before round 1: the method has a `client_prepare`."""
        return type(self).client_prepare is not Method.client_prepare

    def weight(self, rows: int) -> float:
        """The weight a_k of a client with so many training rows, before the normalisation."""
        return float(rows) if self.weighting == "samples" else 1.0

    def client_init(self, client: int, initial: Initial) -> ClientState:
        """The state of a new client. Clients with equal states should share the same objects.

        It must depend on the arguments alone: it is also used to test clients that never took part.
        """
        return NOTHING

    def client_start(self, client: Client, server: ServerState) -> ClientState:
        """The state of a new client after it received the weights for the first time."""
        return client.state

    def client_prepare(self, client: Client, server: ServerState) -> ClientUpdate:
        """The client's message before round 1, if the method has such a step: an update without weights."""
        raise NotImplementedError(f"{self.name} prepares nothing")

    def server_prepare(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """The server before round 1, from the means of the clients' messages."""
        return server

    def message(self, server: ServerState, client: int, peers: Peers) -> ServerState:
        """The message to a participant in a round; `server` itself if all clients get the same."""
        return server

    @abstractmethod
    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        """The client's side of a round. It depends on the arguments alone."""

    def server_init(self, initial: Initial) -> ServerState:
        """The server before round 1."""
        return ServerState(initial.weights, kept=self.server_optimizer.moments(initial.weights))

    def server_update(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """The server's side of a round: w_{t+1} = w_t - sum a_k U_k (paper, Eq. 4) with the default optimizer."""
        return self.server_optimizer.step(server, aggregate)

    @property
    def finds_first_mask(self) -> bool:
        """True if `client_start` finds a client's first mask, so that the client receives the dense weights."""
        return False

    def receives_dense(self, round: int) -> bool:
        """True if clients receive all weights in a round (from 0), not only those under their mask."""
        return False

    def searching(self, round: int) -> bool:
        """True if a round (from 0) searches for masks. Such rounds have equal costs, and so do all other rounds. A mask
        that all clients share changes after them."""
        return False

    def personal(self, weights: torch.Tensor, state: ClientState) -> torch.Tensor | Mixture:
        """The personal model [total] of a client, from the global weights [total] and its state."""
        raise NotImplementedError(f"{self.name} has no personal model")

    def describe(self, round: int) -> dict[str, float]:
        """Quantities of a round (from 0) to log, by name. The names are the same in every round."""
        return {}


class PersonalMethod(Method):
    """A method whose clients keep personal weights beside those of the server: "weights" in their state.

    They start at w_0.
    """

    personal_is_own: ClassVar[bool] = True

    def client_init(self, client: int, initial: Initial) -> ClientState:
        return ClientState(weights=initial.weights)

    def personal(self, weights: torch.Tensor, state: ClientState) -> torch.Tensor:
        return state.tensor("weights")


class MaskedMethod(Method):
    """A method with client masks from a mask searcher."""

    uses_mask: ClassVar[bool] = True
    uses_sparsity: ClassVar[bool] = True

    @property
    def finds_first_mask(self) -> bool:
        return self.searcher.searches_first

    def receives_dense(self, round: int) -> bool:
        return self.searcher.receives_dense(round)

    def searching(self, round: int) -> bool:
        return self.searcher.searching(round)

    def describe(self, round: int) -> dict[str, float]:
        return self.searcher.describe(round)
