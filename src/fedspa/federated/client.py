"""The client that a method trains in a run: it computes by an engine, and adds up its FLOPs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedspa.core.client import ClientUpdate, Diverged, Proximal, Trainable, Trained
from fedspa.core.client_state import ClientState
from fedspa.core.clock import Clock
from fedspa.core.randomness import generator
from fedspa.core.records import Costs, times
from fedspa.core.settings import TrainingSettings
from fedspa.core.weights import ParameterSpace, all_finite
from fedspa.costs.network import NetworkCosts
from fedspa.federated.own_layers import OwnLayers
from fedspa.methods.checking import check_vector
from fedspa.training.base import Engine, LocalTask


@dataclass(frozen=True, kw_only=True)
class ClientSetup:
    """Everything about a client's computation that stays the same from client to client."""

    seed: int
    training: TrainingSettings
    engine: Engine
    network: NetworkCosts
    client_rows: Sequence[np.ndarray]
    """int64, the training rows of each client."""
    target_counts: Sequence[int] = ()
    """Active parameters of each tensor that the layer sparsity asks for; empty for a dense method."""
    own_layers: OwnLayers = field(default_factory=OwnLayers)
    """The layers of the network that clients keep to themselves."""

    @property
    def space(self) -> ParameterSpace:
        """Where each tensor lies in the flat weights that server and methods share."""
        return self.engine.space.shared


class LocalClient:
    """One client in one round: the `Client` of a method, computed by an engine."""

    def __init__(
        self,
        setup: ClientSetup,
        *,
        id: int,
        round: int,
        first: bool,
        weights: torch.Tensor,
        state: ClientState,
        method: str,
    ) -> None:
        """
        Args:
            round: from 0.
            first: whether the client has not completed any update yet.
            weights: the global weights [shared] as the client received them.
            state: what the client remembers, its own layers included.
            method: the name of the method, for messages.
        """
        self.id, self.round, self.first, self.weights = id, round, first, weights
        self.costs = Costs()
        """FLOPs of all that was computed so far."""
        self.clock = Clock()
        self._setup, self._state, self._method = setup, state, method
        self._own: dict[str, torch.Tensor] = {name: state.tensor(name) for name in setup.own_layers.first}
        self._received = dict(self._own)
        self._mask: torch.Tensor | None = None
        self._counts: dict[int, tuple[torch.Tensor, tuple[int, ...]]] = {}
        self._trainings: list[Trained] = []

    @property
    def state(self) -> ClientState:
        """What the client remembers from its last update."""
        return self._state

    @state.setter
    def state(self, state: ClientState) -> None:
        self._state, self._mask = state, None

    @property
    def mask(self) -> torch.Tensor:
        """The mask of the client's state: [total] zeros and ones in the dtype of the weights."""
        if self._mask is None:
            assert self.state.mask is not None
            self._mask = self.state.mask.unpack(like=self.weights)
        return self._mask

    def has_mask(self, mask: torch.Tensor) -> bool:
        """Whether this tensor is the mask of the client's state, which the server knows too."""
        return mask is self._mask

    @property
    def space(self) -> ParameterSpace:
        return self._setup.space

    @property
    def training(self) -> TrainingSettings:
        return self._setup.training

    @property
    def target_counts(self) -> Sequence[int]:
        return self._setup.target_counts

    @property
    def rows(self) -> torch.Tensor:
        """int64 [n] on the CPU: the client's training rows."""
        return torch.from_numpy(self._setup.client_rows[self.id])

    @property
    def samples(self) -> int:
        """Samples trained on so far, in trainings that did not diverge."""
        return sum(trained.samples for trained in self._trainings)

    @property
    def title(self) -> str:
        """The client as messages name it."""
        return f"client {self.id} in round {self.round + 1}"

    @property
    def loss(self) -> torch.Tensor:
        """float64 scalar: the mean over those samples; NaN where there are none."""
        trainings = [trained for trained in self._trainings if trained.samples]
        if not trainings:
            return torch.full((), math.nan, dtype=torch.float64, device=self.weights.device)
        if len(trainings) == 1:
            return trainings[0].loss
        return torch.stack([trained.loss * trained.samples for trained in trainings]).sum() / self.samples

    def with_own_layers(self, update: ClientUpdate) -> ClientUpdate:
        """The update with a state, and a state and local model that hold the client's own layers."""
        state = self.state if update.state is None else update.state
        if not self._own:
            return replace(update, state=state)
        local = update.local
        if local is not None:
            local = self._setup.own_layers.complete(local, self._own)
        return replace(update, state=state | self._own, local=local)

    def generator(self, purpose: str) -> torch.Generator:
        """The source of this client's random draws in this round, one for each purpose."""
        return generator(self._setup.seed, purpose, self.round, self.id)

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
        """Train from `weights`; see `Client.train`."""
        anchor = proximal.anchor if proximal else None
        self._check(train_weights=weights, train_mask=mask, train_anchor=anchor, train_correction=correction)
        if isinstance(trainable, torch.Tensor):
            self._check(train_trainable=trainable)
        task = LocalTask(
            weights=weights,
            rows=self.rows,
            epochs=self.training.epochs if epochs is None else epochs,
            learning_rate=self.training.lr_at(self.round),
            generator=batches or self.generator("batches"),
            mask=mask,
            proximal=proximal or self._default_proximal(weights),
            correction=correction,
        )
        own = dict(self._own)
        trained = self._fit(task, trainable, personal)
        active = None if mask is None else self.count(mask)
        self._charge(train_flops=self._setup.network.training_flops(active, trained.samples))
        if trained.samples:
            loss = float(trained.loss)
            if not (math.isfinite(loss) and all_finite(trained.weights)):
                self._own = own  # a method may catch this and train again
                raise Diverged(f"weights or its loss ({loss:.6g}) are not finite")
        self._trainings.append(trained)
        return trained

    def finetune(self, epochs: int) -> torch.Tensor:
        """The client's whole model, trained from the received weights. Nothing is charged or checked."""
        task = LocalTask(
            weights=self.weights,
            rows=self.rows,
            epochs=epochs,
            learning_rate=self.training.lr_at(self.round),
            generator=self.generator("finetune"),
        )
        return self._setup.own_layers.complete(self._fit(task).weights, self._own)

    def _default_proximal(self, weights: torch.Tensor) -> Proximal | None:
        strength = self.training.proximal
        return Proximal(weights, strength) if strength else None

    def _fit(self, task: LocalTask, trainable: Trainable = "all", personal: bool = False) -> Trained:
        """Do a task of the shared layers, on the whole network: the client's own layers are trained along."""
        layers = self._setup.own_layers
        task = layers.whole_task(task, trainable, self._own, self._received, personal)
        with self.timed("train"):
            trained = self._setup.engine.train(task)
        if not self._own:
            return trained
        shared, self._own[layers.name(personal)] = layers.cut(trained.weights)
        return replace(trained, weights=shared)

    def gradient(self, weights: torch.Tensor, purpose: str) -> torch.Tensor:
        """The dense gradient of one mini-batch; see `Client.gradient`."""
        self._check(gradient_weights=weights)
        setup = self._setup
        with self.timed("search"):
            whole = setup.own_layers.complete(weights, self._own)
            gradient = setup.engine.gradient(whole, self.rows, self.generator(purpose))[: len(weights)]
        searched = min(self.training.batch_size, len(self.rows))
        self._charge(search_flops=setup.network.search_flops(searched))
        if not all_finite(gradient):
            raise Diverged("gradient is not finite")
        return gradient

    def accuracy(self, weights: torch.Tensor, mask: torch.Tensor | None = None) -> float:
        """The accuracy on the client's training rows; see `Client.accuracy`."""
        self._check(accuracy_weights=weights, accuracy_mask=mask)
        setup = self._setup
        active = None if mask is None else self.count(mask)
        self._charge(search_flops=times(setup.network.forward_flops(active), len(self.rows)))
        with self.timed("search"):
            return setup.engine.accuracy(setup.own_layers.complete(weights, self._own), self.rows)

    def count(self, mask: torch.Tensor) -> tuple[int, ...]:
        """The active parameters of each tensor under a mask [total]."""
        if id(mask) not in self._counts:
            self._counts[id(mask)] = mask, self.space.count(mask)
        return self._counts[id(mask)][1]

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Count the seconds of a block for a phase of the round."""
        return self.clock(phase)

    def _check(self, **vectors: torch.Tensor | None) -> None:
        """Raise `UserError` unless the arguments of a call, named `<call>_<argument>`, are like the weights."""
        for name, vector in vectors.items():
            if vector is not None:
                call, _, argument = name.partition("_")
                check_vector(self._method, f"client.{call}({argument}=)", vector, self.weights)

    def _charge(self, **costs: Any) -> None:
        self.costs += Costs(**costs)
