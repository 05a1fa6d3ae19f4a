"""Layers that every client keeps to itself, such as its BatchNorm layers in FedBN (Li et al., 2021).

Server, method, masks and messages know only the tensors that are shared (`ParameterSpace.shared`), an engine needs the
whole network. What is missing lies in the client's state and is put behind whatever a visit sends to the engine; what
training made of it is taken off again, and goes back to the state. So none of them notices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from fedspa.client_state import ClientState, Item
from fedspa.methods.base import Visit
from fedspa.rounds.client_states import Held
from fedspa.rounds.lockstep import Dialogue, relayed
from fedspa.rounds.requests import Gradient, Predict, Pull, Request, Train, TrainingAccuracy

T = TypeVar("T")

SHARED_MODEL, PERSONAL_MODEL = "own_layers.shared", "own_layers.personal"
"""What a client's state calls its layers in the model whose update is sent, and in a personal one that is trained by
itself."""


@dataclass(frozen=True)
class OwnLayers:
    """Completes flat weights of the shared tensors, [shared], to those of the network, [total], and cuts them off."""

    initial: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """[total - shared]: the layers of a client that was never visited; empty where clients keep none."""
    trains_personal: bool = False
    """As `Method.trains_personal` says: personal models then have layers of their own."""

    @property
    def first(self) -> dict[str, Item]:
        """What the state of a client holds of them before its first visit."""
        if not len(self.initial):
            return {}
        names = (SHARED_MODEL, PERSONAL_MODEL) if self.trains_personal else (SHARED_MODEL,)
        return dict.fromkeys(names, self.initial)

    def of(self, state: Held) -> Held:
        """The part of a client's state that completes the server's weights; what is in a file is unread."""
        return {name: item for name, item in state.items() if name == SHARED_MODEL}

    def complete(
        self, weights: torch.Tensor, state: Mapping[str, Any], personal: bool = False
    ) -> torch.Tensor:
        """A client's model [total] of weights [shared]; `personal`: its personal one."""
        return torch.cat([weights, state[self._name(personal)]]) if len(self.initial) else weights

    def visit(self, visit: Dialogue[Visit], state: ClientState) -> Dialogue[Visit]:
        """A client's visit, which trains its own layers along; they go back to its state, and its local model is
        whole."""
        own = {name: state.tensor(name) for name in self.first}
        made = yield from self.completed(visit, own)
        local = None if made.local is None else self.complete(made.local, own)
        return replace(made, state=made.state | own, local=local) if own else made

    def completed(self, dialogue: Dialogue[T], own: dict[str, torch.Tensor]) -> Dialogue[T]:
        """The dialogue with its requests completed by a client's layers; what training makes of them replaces them."""
        if not own:
            return (yield from dialogue)
        shared, sent = -len(self.initial), dict(own)

        def cut(request: Request, answer: Any) -> Any:
            if isinstance(request, Train):
                own[self._name(request.personal)] = answer.weights[shared:].clone()
                return replace(answer, weights=answer.weights[:shared].clone())
            return answer[:shared] if isinstance(request, Gradient) else answer

        return (yield from relayed(dialogue, lambda request: self._whole(request, own, sent), cut))

    def _whole(
        self, request: Request, own: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]
    ) -> Request:
        """The request of the whole network. A pull is towards the model that the client was sent, as it was then."""
        match request:
            case Train(weights=weights, mask=mask, pull=pull, personal=personal):
                return replace(
                    request,
                    weights=self.complete(weights, own, personal),
                    mask=mask if mask is None else torch.cat([mask, torch.ones_like(self.initial)]),
                    pull=pull and Pull(self.complete(pull.anchor, sent), pull.strength),
                )
            case Gradient() | TrainingAccuracy() | Predict():
                return replace(request, weights=self.complete(request.weights, own))
        return request

    def _name(self, personal: bool) -> str:
        return PERSONAL_MODEL if personal and self.trains_personal else SHARED_MODEL
