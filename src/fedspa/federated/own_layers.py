"""Personal layers, which stay with each client, such as its BatchNorm layers in FedBN (Li et al., 2021).

Server, method, masks and messages know only the shared tensors (`ParameterSpace.shared`); an engine needs the
whole network. The client's personal layers are part of its state. They complete the weights before the engine
computes, and are cut off afterwards, so that a method never sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedspa.core.client import Mixture, Proximal, Trainable
from fedspa.core.client_state import ClientState, Item
from fedspa.training.base import LocalTask

SHARED_MODEL, PERSONAL_MODEL = "own_layers.shared", "own_layers.personal"
"""The names, in a client's state, of its personal layers: in the model whose update is sent, and in a personal model
that is trained beside it."""


@dataclass(frozen=True)
class OwnLayers:
    """Completes flat weights of the shared tensors, [shared], to those of the network, [total]."""

    initial: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """The personal layers of a new client [total - shared]; empty if there are none."""
    trains_personal: bool = False
    """See `Method.trains_personal`. If True, the personal model has further personal layers."""

    @property
    def first(self) -> dict[str, Item]:
        """The layers in the state of a new client, by name."""
        if not len(self.initial):
            return {}
        names = (SHARED_MODEL, PERSONAL_MODEL) if self.trains_personal else (SHARED_MODEL,)
        return dict.fromkeys(names, self.initial)

    def of(self, state: ClientState) -> ClientState:
        """The part of a client's state that completes the server's weights."""
        return ClientState({name: item for name, item in state.items() if name == SHARED_MODEL})

    def name(self, personal: bool) -> str:
        """The name of the layers of a personal model, or of the model whose update is sent."""
        return PERSONAL_MODEL if personal and self.trains_personal else SHARED_MODEL

    def complete(
        self, weights: torch.Tensor, state: Mapping[str, Any], personal: bool = False
    ) -> torch.Tensor:
        """A client's model [total] from weights [shared] and its state; `personal`: its personal model."""
        return torch.cat([weights, state[self.name(personal)]]) if len(self.initial) else weights

    def complete_personal(
        self, model: torch.Tensor | Mixture, state: Mapping[str, Any]
    ) -> torch.Tensor | Mixture:
        """A client's personal model over [total], from the model over [shared]."""
        if not isinstance(model, Mixture):
            return self.complete(model, state, personal=True)
        personal, shared = self.complete(model.personal, state, True), self.complete(model.shared, state)
        return Mixture(personal, shared, model.alpha)

    def cut(self, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The shared part [shared] and the personal part [total - shared] of a vector [total]."""
        shared = len(vector) - len(self.initial)
        return vector[:shared].clone(), vector[shared:].clone()

    def whole_task(
        self,
        task: LocalTask,
        trainable: Trainable,
        own: Mapping[str, torch.Tensor],
        received: Mapping[str, torch.Tensor],
        personal: bool,
    ) -> LocalTask:
        """A task over [shared] as a task over the whole network [total].

        Args:
            own: the client's personal layers now, by name.
            received: the layers at the beginning of the round, for the anchor of the proximal term.
            personal: True if the client's personal model is trained.
        """
        alone = isinstance(trainable, str) and trainable == "personal"
        if isinstance(trainable, torch.Tensor):
            task = replace(task, trainable=trainable)
        elif alone:
            task = replace(task, trainable=torch.zeros_like(task.weights))
        elif trainable == "shared" and len(self.initial):
            task = replace(task, trainable=torch.ones_like(task.weights))
        if not len(self.initial):
            return task
        proximal = task.proximal
        if proximal is not None:
            proximal = Proximal(self.complete(proximal.anchor, received), proximal.strength)
        return replace(
            task,
            weights=self.complete(task.weights, own, personal),
            mask=self._behind(task.mask, 1.0),
            forward=self._behind(task.forward, 1.0),
            proximal=proximal,
            correction=self._behind(task.correction, 0.0),
            trainable=self._behind(task.trainable, float(alone)),
        )

    def _behind(self, vector: torch.Tensor | None, value: float) -> torch.Tensor | None:
        """A vector [shared] followed by a constant for the client's personal layers."""
        return vector if vector is None else torch.cat([vector, torch.full_like(self.initial, value)])
