"""What a federated method is: what a client starts from, trains, sends and costs, and which models it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fedspa.client_state import NOTHING, ClientState
from fedspa.errors import check_choice
from fedspa.masks.packed import PackedMask
from fedspa.randomness import generator
from fedspa.records import Costs
from fedspa.rounds.clock import Clock
from fedspa.rounds.requests import Pull, Request, Train
from fedspa.settings import TrainingSettings

if TYPE_CHECKING:
    import torch

    from fedspa.costing.costs import NetworkCosts
    from fedspa.masks.base import MaskSearcher
    from fedspa.weights import ParameterSpace


@dataclass(frozen=True)
class Origin:
    """What the federation starts from, for the state of clients that were never visited."""

    weights: torch.Tensor
    """The initial global weights w_0 [total]."""
    initial_mask: Callable[[int], PackedMask]
    """A client's first mask."""
    full_mask: PackedMask
    """The mask of a dense model."""


@dataclass(frozen=True)
class VisitSize:
    """What the costs of a visit depend on."""

    network: NetworkCosts
    training: TrainingSettings
    rows: int
    """The client's training rows."""
    active: Sequence[int] | None = None
    """Active parameters of each tensor in the model that is trained; None where it is dense."""
    first: bool = False
    """Whether the client was never visited before."""
    searching: bool = True
    """Whether the visit is in a round in which masks are searched for."""


@dataclass(frozen=True)
class ClientTask:
    """Everything that one visit to one client may use."""

    seed: int
    round: int
    """From 0."""
    client: int
    first_visit: bool
    rows: torch.Tensor
    """int64 [n] on the CPU: the client's training rows."""
    learning_rate: float
    weights: torch.Tensor
    """The dense global weights w_t [total]; not to be written."""
    state: ClientState
    space: ParameterSpace
    network: NetworkCosts
    training: TrainingSettings
    searcher: MaskSearcher | None
    active: Sequence[int]
    """How many parameters of each tensor the layer sparsity wants active; empty for a dense method."""
    clock: Clock
    """For the method's own work between requests, whose seconds are counted where they are answered."""

    @property
    def own_mask(self) -> PackedMask:
        """The mask of the client's model, for methods that remember one."""
        assert self.state.mask is not None
        return self.state.mask

    @property
    def own_weights(self) -> torch.Tensor:
        """The client's weights [total], for methods that remember them under that name."""
        return self.state.tensor("weights")

    def generator(self, purpose: str) -> torch.Generator:
        """The random source of this client in this round for one purpose."""
        return generator(self.seed, purpose, self.round, self.client)

    def train(
        self,
        start: torch.Tensor,
        epochs: int,
        *,
        mask: torch.Tensor | None = None,
        pull: Pull | None = None,
        source: torch.Generator | None = None,
        personal: bool = False,
    ) -> Train:
        """Asks to train from `start` [total]; `source` draws the batches where they go on from earlier ones.

        `personal`: it is the method's own personal model, and not the one whose update is sent.
        """
        return Train(
            weights=start,
            rows=self.rows,
            epochs=epochs,
            learning_rate=self.learning_rate,
            generator=source or self.generator("batches"),
            mask=mask,
            pull=pull,
            personal=personal,
        )

    def size(self, active: Sequence[int] | None = None) -> VisitSize:
        """The visit's size, for the method's closed-form costs."""
        searching = self.searcher is None or self.searcher.searching(self.round)
        return VisitSize(
            self.network, self.training, len(self.rows), active, first=self.first_visit, searching=searching
        )


@dataclass(frozen=True, kw_only=True)
class Visit:
    """What one visit to one client leaves."""

    update: torch.Tensor | None
    """U_k [total] = start - end: the server subtracts its mean. None: nothing is sent."""
    holds: torch.Tensor | None = None
    """The coordinates [total] that the update speaks of, zeros and ones in the dtype of the weights; None: all."""
    state: ClientState = field(default_factory=ClientState)
    """What is remembered until the client's next visit."""
    local: torch.Tensor | None
    """The client's weights [total] right after its local training; None once they were tested and nobody keeps them."""
    loss: torch.Tensor
    """float64 scalar on any device: the mean over the samples trained on."""
    samples: int
    costs: Costs


@dataclass(kw_only=True)
class Method(ABC):
    """A federated method. Its server step always has the form w - sum a_k U_k (see merge.py)."""

    name: str
    weighting: str
    """a_k: the same for all participants (uniform) or proportional to their training rows (samples)."""
    normaliser: str = "participants"
    """Whether each coordinate is divided by all participants' weight, or by that of those who hold it."""

    kinds: ClassVar[tuple[str, ...]]
    """Which models of a client the method has: of global, personal and local."""
    personal_is_own: ClassVar[bool] = False
    """Whether the personal model is a function of the client's state alone: between two visits it stays the same."""
    trains_personal: ClassVar[bool] = False
    """Whether its visits train the personal model by itself (`ClientTask.train(..., personal=True)`)."""
    sends: ClassVar[bool] = True
    """Whether its clients and the server send each other anything."""
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

    def first_state(self, client: int, origin: Origin) -> ClientState:
        """The state of a client that was never visited; made of the same objects for all where it is the same."""
        return NOTHING

    @abstractmethod
    def visit(self, task: ClientTask) -> Generator[Request, Any, Visit]:
        """Visit one client: a function of the task alone. All vectors that it asks for and leaves are like the global
        weights in shape, dtype and device; any other ends the run with a sentence that names the method.

        Whatever needs the network is asked for: `trained = yield task.train(start, epochs)`. Between requests the
        visits of other clients go on, so that nothing may be kept outside the task.
        """

    @abstractmethod
    def visit_costs(self, size: VisitSize, searcher: MaskSearcher | None) -> Costs:
        """What a visit of that size costs, in closed form."""

    def down_costs(self, size: VisitSize, searcher: MaskSearcher | None) -> Costs:
        """What is sent to a client costs, whatever it answers: values, and at its first visit perhaps a mask."""
        whole, later = (self.visit_costs(s, searcher) for s in (size, replace(size, first=False)))
        return Costs(down_bytes=whole.down_bytes, mask_bytes=whole.mask_bytes - later.mask_bytes)

    def personal(
        self, weights: torch.Tensor, state: ClientState, searcher: MaskSearcher | None
    ) -> torch.Tensor:
        """The personal model [total] of a client: a function of the global weights and its state."""
        raise NotImplementedError(f"{self.name} has no personal model")
