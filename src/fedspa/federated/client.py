"""The client in a run: it computes with an engine, and adds up its FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch

from fedspa.core.client import ClientUpdate, Diverged, Proximal, Trainable, Trained
from fedspa.core.client_state import ClientState
from fedspa.core.clock import Clock
from fedspa.core.packed_mask import PackedMask
from fedspa.core.randomness import generator
from fedspa.core.records import Costs, times
from fedspa.core.transfers import Reads
from fedspa.core.weights import finite
from fedspa.federated.client_setup import ClientSetup
from fedspa.methods.checking import check_vector
from fedspa.training.base import LocalTask


@dataclass(kw_only=True, eq=False)
class LocalClient:
    """One client in one round: implements the `Client` of a method with an engine."""

    setup: ClientSetup
    id: int
    round: int
    """From 0."""
    first: bool
    """True if the client has not completed any update yet."""
    weights: torch.Tensor
    """The global weights [shared] that the client received."""
    state: ClientState
    """The client's state after its last update."""
    method: str
    """The name of the method, for messages."""
    reads: Reads | None = None
    """Collects the values for `later`; None: each value is read at once."""
    costs: Costs = field(default_factory=Costs)
    """The costs of all computations and messages so far."""
    waits: int = 0
    """The number of times that the client has waited for values of the device."""
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        setup, layers = self.setup, self.setup.own_layers.first
        self.initial, self.space, self.training = setup.initial.weights, setup.space, setup.training
        self.rows = torch.from_numpy(setup.client_rows[self.id])
        self.title = f"client {self.id} in round {self.round + 1}"
        self._own: dict[str, torch.Tensor] = {name: self.state.tensor(name) for name in layers}
        self._received = dict(self._own)
        self._unpacked: tuple[PackedMask | None, torch.Tensor | None] = None, None
        self._counts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._trainings: list[Trained] = []
        self._anchors: dict[torch.Generator, torch.Tensor] = {}
        """The start of the first training with each generator of batches."""
        self._actions: list[tuple[Callable[[], list[torch.Tensor]], Callable[..., None]]] = []

    @property
    def mask(self) -> torch.Tensor:
        """The mask of the client's state: [total] zeros and ones in the dtype of the weights."""
        packed, mask = self._unpacked
        if mask is None or packed is not self.state.mask:
            assert self.state.mask is not None
            mask = self.state.mask.unpack(like=self.weights)
            self._unpacked = self.state.mask, mask
        return mask

    def has_mask(self, mask: torch.Tensor) -> bool:
        """True if this tensor is the mask of the client's state, which the server knows too."""
        return self._unpacked[1] is mask and self._unpacked[0] is self.state.mask

    @property
    def samples(self) -> int:
        """The samples of all trainings so far that did not diverge."""
        return sum(trained.samples for trained in self._trainings)

    @property
    def loss(self) -> torch.Tensor:
        """float64 scalar: the mean over those samples; NaN without samples."""
        trainings = [trained for trained in self._trainings if trained.samples]
        if not trainings:
            return torch.full((), math.nan, dtype=torch.float64, device=self.weights.device)
        if len(trainings) == 1:
            return trainings[0].loss
        return torch.stack([trained.loss * trained.samples for trained in trainings]).sum() / self.samples

    def with_own_layers(self, update: ClientUpdate) -> ClientUpdate:
        """The update with a state; the state and the local model are completed by the client's personal layers."""
        state = self.state if update.state is None else update.state
        if not self._own:
            return replace(update, state=state)
        local = update.local
        if local is not None:
            local = self.setup.own_layers.complete(local, self._own)
        return replace(update, state=state | self._own, local=local)

    def generator(self, purpose: str) -> torch.Generator:
        """The source of this client's random draws in this round, one for each purpose."""
        return generator(self.setup.seed, purpose, self.round, self.id)

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
        """Train from `weights` [total]; see `Client.train`."""
        self._check(
            "train",
            weights=weights,
            mask=mask,
            forward=forward,
            anchor=proximal.anchor if proximal else None,
            correction=correction,
            trainable=trainable if isinstance(trainable, torch.Tensor) else None,
        )
        if proximal is None and self.training.proximal:
            anchor = weights if batches is None else self._anchors.setdefault(batches, weights)
            proximal = Proximal(anchor, self.training.proximal)
        if proximal is not None and mask is not None:  # it must not move the other weights
            proximal = replace(proximal, anchor=torch.where(mask > 0, proximal.anchor, weights))
        task = LocalTask(
            weights=weights,
            rows=self.setup.public if public else self.rows,
            epochs=self.training.epochs if epochs is None else epochs,
            learning_rate=self.training.lr_at(self.round),
            generator=batches or self.generator("batches"),
            mask=mask,
            forward=forward,
            proximal=proximal,
            correction=correction,
            others=others or {},
        )
        before = dict(self._own)
        trained = self._fit(task, trainable, personal)
        network, samples = self.setup.network, trained.samples

        def costs(active: tuple[int, ...] | None, forward_active: tuple[int, ...] | None) -> Costs:
            return Costs(train_flops=network.training_flops(active, samples, forward_active, further_passes))

        self._charge(costs, mask, forward)
        if samples:
            try:
                self.later([trained.loss, finite(trained.weights)], _check_training)
            except Diverged:
                self._own = before  # a method may catch this and train again
                raise
        self._trainings.append(trained)
        return trained

    def finetune(self, epochs: int) -> torch.Tensor:
        """Train the client's whole model from the received weights. Nothing is charged or checked."""
        task = LocalTask(
            weights=self.weights,
            rows=self.rows,
            epochs=epochs,
            learning_rate=self.training.lr_at(self.round),
            generator=self.generator("finetune"),
        )
        return self.setup.own_layers.complete(self._fit(task).weights, self._own)

    def _fit(self, task: LocalTask, trainable: Trainable = "all", personal: bool = False) -> Trained:
        """Train the shared layers of a task, and the personal layers of the client with them."""
        layers = self.setup.own_layers
        task = layers.whole_task(task, trainable, self._own, self._received, personal)
        with self.timed("train"):
            trained = self.setup.engine.train(task)
        if not self._own:
            return trained
        shared, self._own[layers.name(personal)] = layers.cut(trained.weights)
        return replace(trained, weights=shared)

    def gradient(self, weights: torch.Tensor, purpose: str) -> torch.Tensor:
        """The dense gradient of one mini-batch; see `Client.gradient`."""
        self._check("gradient", weights=weights)
        setup = self.setup
        with self.timed("search"):
            whole = setup.own_layers.complete(weights, self._own)
            gradient = setup.engine.gradient(whole, self.rows, self.generator(purpose))[: len(weights)]
        searched = min(self.training.batch_size, len(self.rows))
        self._charge(lambda: Costs(search_flops=setup.network.search_flops(searched)))
        self.later([finite(gradient)], _check_gradient)
        return gradient

    def accuracy(self, weights: torch.Tensor, mask: torch.Tensor | None = None) -> float:
        """The accuracy on the client's training rows; see `Client.accuracy`."""
        self._check("accuracy", weights=weights, mask=mask)
        setup, rows = self.setup, len(self.rows)
        self._charge(
            lambda active: Costs(search_flops=times(setup.network.forward_flops(active), rows)), mask
        )
        self.waits += 1
        with self.timed("search"):
            return setup.engine.accuracy(setup.own_layers.complete(weights, self._own), self.rows)

    def outputs(self, weights: torch.Tensor) -> torch.Tensor:
        """The network's outputs for the public rows; see `Client.outputs`."""
        self._check("outputs", weights=weights)
        setup, rows = self.setup, self.setup.public
        self._charge(lambda: Costs(train_flops=times(setup.network.forward_flops(), len(rows))))
        with self.timed("train"):
            return setup.engine.outputs(setup.own_layers.complete(weights, self._own), rows)

    def count(self, mask: torch.Tensor) -> tuple[int, ...]:
        """The active parameters of each tensor under a mask [total]; see `Client.count`."""
        counts = self._counts_of(mask)
        if counts.device.type != "cpu":
            counts = self.read(counts)
            self._counts[id(mask)] = mask, counts
        return tuple(counts.tolist())

    def count_later(self, mask: torch.Tensor) -> None:
        """Make a later `count` of this mask free of waiting, once the client has settled."""

        def keep(counts: torch.Tensor) -> None:
            self._counts[id(mask)] = mask, counts

        self.later([self._counts_of(mask)], keep)

    def _counts_of(self, mask: torch.Tensor) -> torch.Tensor:
        """The counts as int64 [tensors]; on the CPU if the packed mask is there, else on the device."""
        if id(mask) not in self._counts:
            packed = self.state.mask if self.has_mask(mask) else None
            flags = mask if packed is None or packed.bits.device.type != "cpu" else packed.flags
            self._counts[id(mask)] = mask, self.space.counts(flags)
        return self._counts[id(mask)][1]

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """A value on the CPU; see `Client.read`."""
        self.waits += 1
        return value.cpu()

    def later(self, values: Sequence[torch.Tensor], action: Callable[..., None]) -> None:
        """Call an action with values once they are known; see `Client.later`."""
        if self.reads is None:
            action(*values)
        else:
            self._actions.append((self.reads.add(values), action))

    def settle(self) -> None:
        """Run the actions of `later`, in the order of the calls. Raises the error of the first action that fails."""
        for values, action in self._actions:
            action(*values())

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Count the seconds of a block for a phase of the round."""
        return self.clock(phase)

    def _check(self, call: str, **vectors: torch.Tensor | None) -> None:
        """Raise `UserError` unless the arguments of a call are like the weights."""
        for name, vector in vectors.items():
            if vector is not None:
                check_vector(self.method, f"client.{call}({name}=)", vector, self.weights)

    def _charge(self, costs: Callable[..., Costs], *masks: torch.Tensor | None) -> None:
        """Add `costs`, called with the active parameters under each mask as a tuple; None for a mask that is None."""

        def add(*counts: torch.Tensor) -> None:
            known = iter(counts)
            self.costs += costs(*(None if mask is None else tuple(next(known).tolist()) for mask in masks))

        self.later([self._counts_of(mask) for mask in masks if mask is not None], add)


def _check_training(loss: torch.Tensor, weights_finite: torch.Tensor) -> None:
    if not (math.isfinite(loss) and weights_finite):
        raise Diverged(f"weights or its loss ({float(loss):.6g}) are not finite")


def _check_gradient(gradient_finite: torch.Tensor) -> None:
    if not gradient_finite:
        raise Diverged("gradient is not finite")
