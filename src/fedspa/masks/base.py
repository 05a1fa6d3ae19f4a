"""The base class of mask searchers. A searcher decides which parameters of a client are active."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from fedspa.core.client import Client, Trained
from fedspa.core.client_state import MASK, ClientState, Item
from fedspa.core.limits import Component, limited
from fedspa.core.packed_mask import PackedMask
from fedspa.core.read_only import read_only
from fedspa.masks.checking import check_mask
from fedspa.masks.search_input import SearchInput

if TYPE_CHECKING:
    import torch

    from fedspa.core.weights import ParameterSpace

Counts: TypeAlias = "Sequence[int] | int | None"
"""The active parameters of a mask: one count for each tensor, the total, or None if unknown."""


class Fitted:
    """The facts of a run that a searcher needs; `fit` sets them."""

    sizes: Sequence[int] = ()
    """The number of parameters of each tensor."""
    target: Sequence[int] = ()
    """The number of active parameters of each tensor, from the layer sparsity."""
    horizon: int = 1
    """The number of rounds of the run."""

    @property
    def sparse(self) -> list[bool]:
        """True for each tensor that the layer sparsity makes sparse."""
        return [count < size for size, count in zip(self.sizes, self.target, strict=True)]


@dataclass(kw_only=True)
class MaskSearcher(Fitted, Component, ABC):
    """Draws the first masks, and finds the next ones: Next_Masks of the paper's Algorithm 1."""

    section: ClassVar[str] = "mask"
    initial: str = limited("same", choices=("same", "different"))
    """same: all clients start from one random mask; different: each client starts from its own."""

    label: ClassVar[str]
    """The spelling in print, where the name of the class has another one. Not inherited."""
    cuts_channels: ClassVar[bool] = False
    """True if masks cut out whole channels. The network's parameter space then has its channels."""

    def check_sparsity(self, rule: str, sparsity: float) -> None:  # noqa: B027 (most searchers take any)
        """Raise `UserError` if the sparsity, or the rule of layer_sparsity by its name, does not fit the masks."""

    def fit(self, space: ParameterSpace, target: Sequence[int], horizon: int) -> None:
        """Store the network's parameters, the counts of the layer sparsity, and the number of rounds."""
        self.sizes, self.target, self.horizon = space.sizes, tuple(target), horizon

    # The plan -------------------------------------------------------------------------------------------

    def searching(self, round: int) -> bool:
        """True if a round (from 0) searches for masks, so that the next mask travels. In other rounds masks stay, and
        no search is charged."""
        return False

    def exchanging(self, round: int) -> bool:
        """True if a search in a round exchanges parameters even while the planned counts stay the same."""
        return self.searching(round)

    def counts(self, round: int) -> Counts:
        """The planned active parameters of a mask found in a round (from 0). Round -1 is the random first mask.

        Returns one count for each tensor, the total if counts move between tensors, or None if only the run decides.
        A mask that breaks the plan ends the run. The predicted costs of a run follow the plan, and are a bound if
        the plan is open.
        """
        return self.target

    @property
    def first_counts(self) -> Counts:
        """The active bits of a random first mask in each tensor; with channels in each group of them."""
        return self.counts(-1)

    @property
    def keeps_tensors(self) -> bool:
        """True if the plan has one count for each tensor."""
        return isinstance(self.counts(0), Sequence)

    @property
    def is_fixed(self) -> bool:
        """True if all masks have the counts of the layer sparsity."""
        return type(self).counts is MaskSearcher.counts

    def changes(self, found: int, round: int) -> bool:
        """True if a search in a round changes a mask that was found in the round `found` (-1: the first mask)."""
        return self.searching(round) and (self.exchanging(round) or self.counts(found) != self.counts(round))

    # What a search may look at --------------------------------------------------------------------------

    @property
    def needs_gradient(self) -> bool:
        """True if a search that exchanges parameters needs the dense gradient. Its cost is then charged."""
        return False

    searches_first: ClassVar[bool] = False
    """True if `first_mask` finds a client's first mask from its data. The client then receives the dense weights, and
    does not search again in that round. False: the first mask is drawn at random."""

    @property
    def needs_first_gradient(self) -> bool:
        """True if `first_mask` needs the dense gradient. Its cost is then charged."""
        return self.searches_first

    def receives_dense(self, round: int) -> bool:
        """True if clients receive the dense weights in a round, not only those under their mask. It is charged."""
        return False

    # The masks ------------------------------------------------------------------------------------------

    @abstractmethod
    def next_mask(self, search: SearchInput) -> torch.Tensor:
        """The next mask [trained], zeros and ones in the dtype of `search.mask`; `search.mask` itself for no change."""

    def first_mask(self, search: SearchInput) -> torch.Tensor:
        """The first mask [trained] of a client. It is called if `searches_first`."""
        return search.mask

    def remember(self, search: SearchInput, next_mask: torch.Tensor) -> Mapping[str, Item]:
        """Tensors and packed masks to store in the client's state beside its next mask [trained].

        They are keyed by name (not "mask"), and the next search gets them as `memory`.
        """
        return {}

    def gradient_weights(self, client: Client, trained: torch.Tensor) -> torch.Tensor:
        """The weights [total] of the gradient for a search after training that ended in `trained` [total]."""
        return trained

    def start(self, weights: torch.Tensor, mask: torch.Tensor, memory: Mapping[str, Item]) -> torch.Tensor:
        """The weights [total] that a client's training starts from.

        They are made of the global weights [total], the client's mask [total] and its state.

        If running statistics follow the parameters, the mask is 1 there.
        """
        return mask * weights

    def forward_mask(self, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """The part [total] of a client's mask [total] that is active in the forward pass; None: the whole mask.

        The rest of the mask is still trained, and still travels. `weights` [total] are already masked.
        """
        return None

    def model(self, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The client's model [total]: its weights [total] as the forward pass uses them."""
        active = self.forward_mask(weights, mask)
        return weights if active is None else active * weights

    def describe(self, round: int) -> dict[str, float]:
        """Quantities of a round (from 0) to log, by name. The names are the same in every round."""
        return {}

    # A client's search ----------------------------------------------------------------------------------

    def first_state(self, client: Client) -> ClientState:
        """The state of a new client that has received the weights. With `searches_first` it has a mask from the
        data."""
        if not self.searches_first:
            return client.state
        gradient = None
        if self.needs_first_gradient:
            gradient = client.gradient(client.weights, "first_mask_search")
        return self._searched(client, client.weights, client.weights, gradient, "first_mask")

    def next_state(self, client: Client, start: torch.Tensor, trained: Trained) -> ClientState:
        """The state of a client after training from `start` [total]: the next mask, and the searcher's tensors."""
        if client.first and self.searches_first:
            return client.state
        gradient = None
        if self.needs_gradient and self.exchanging(client.round):
            gradient = client.gradient(self.gradient_weights(client, trained.weights), "mask_search")
        return self._searched(client, start, trained.weights, gradient, "regrow")

    def _searched(
        self,
        client: Client,
        start: torch.Tensor,
        weights: torch.Tensor,
        gradient: torch.Tensor | None,
        purpose: str,
    ) -> ClientState:
        """The state of a client after a search, whose input is cut down to the parameters.

        `purpose`: keys the random draws; "first_mask" or "regrow".
        """
        import torch

        space, trained = client.space.parameters, client.space.trained
        dense = self.receives_dense(client.round) or (client.first and self.searches_first)
        with client.timed("search"):
            search = SearchInput(
                space=space,
                mask=client.mask[:trained],
                weights=weights[:trained],
                gradient=gradient if gradient is None else gradient[:trained],
                round=client.round,
                generator=client.generator(purpose),
                counts=client.count(client.mask)[: len(space.names)],
                start=start[:trained],
                received=client.weights[:trained] if dense else None,
                memory=client.state,
            )
            mask = self._found(client, search, first=purpose == "first_mask")
            memory = self.remember(search, mask)
            if mask is search.mask:
                return ClientState(memory, mask=client.state[MASK])
            return ClientState(memory, mask=PackedMask.pack(torch.cat([mask, client.mask[trained:]])))

    def _found(self, client: Client, search: SearchInput, first: bool) -> torch.Tensor:
        """The checked mask [trained] of `first_mask` or `next_mask`.

        Raises `UserError` with the searcher's name if the mask has another form than `search.mask` or breaks the
        planned counts, if it changed although the searcher does not search, or if the searcher wrote into its
        input.
        """
        title = f"mask={self.name} ({type(self).__module__}.{type(self).__qualname__})"
        given = {name: getattr(search, name) for name in ("mask", "weights", "start", "memory")}
        with read_only(title, {f"search.{name}": value for name, value in given.items()}):
            mask = self.first_mask(search) if first else self.next_mask(search)
        if mask is not search.mask or first:
            may_change = first or self.searching(search.round)
            check_mask(client, title, search, mask, self.counts(search.round), may_change=may_change)
        return mask
