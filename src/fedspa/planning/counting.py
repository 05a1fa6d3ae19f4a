"""Costs before a run, by the method's own code with an engine that counts instead of training.

All computations and messages of the method are charged as in a run. Weights and gradients are zeros; masks have the
counts that the searcher plans for each round. If the plan leaves the counts of tensors open, the costs are the largest
possible ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from fedspa.core.client import Initial, Mixture, Trained
from fedspa.core.client_state import MASK
from fedspa.core.packed_mask import PackedMask
from fedspa.core.records import Costs
from fedspa.core.server import ServerState
from fedspa.core.settings import TrainingSettings
from fedspa.core.weights import ParameterSpace
from fedspa.costs.network import NetworkCosts
from fedspa.federated.client_runner import ClientRunner
from fedspa.federated.client_setup import ClientSetup
from fedspa.federated.jobs import CompletedUpdate, UpdateJob
from fedspa.federated.messages import Messages
from fedspa.masks.base import Counts
from fedspa.methods.base import Method
from fedspa.training.base import LocalTask

T = TypeVar("T")


@dataclass
class CountingEngine:
    """An `Engine` that computes nothing: training returns the same weights, gradients are zero."""

    space: ParameterSpace
    training: TrainingSettings
    classes: int = 0
    """The number of the network's outputs for each example."""
    name: str = "counting"
    forks: bool = False
    compile_seconds: float = 0.0
    lanes: int = 0
    device: torch.device = torch.device("cpu")
    instead_of: dict[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> torch.Tensor:
        return torch.zeros(self.space.total)

    def in_lanes(self, works: Sequence[Callable[[], T]]) -> list[T]:
        return [work() for work in works]

    def train(self, task: LocalTask) -> Trained:
        samples = self.training.samples(len(task.rows), task.epochs)
        steps = -(-samples // self.training.batch_size)  # not exact, but above 0
        return Trained(task.weights, torch.zeros((), dtype=torch.float64), samples, steps, task.others)

    def gradient(self, weights: torch.Tensor, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return torch.zeros_like(weights)

    def accuracy(self, weights: torch.Tensor, rows: torch.Tensor) -> float:
        return 0.0

    def outputs(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(rows), self.classes)

    def predict(
        self, weights: torch.Tensor | Mixture, examples: Any, rows: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        return torch.zeros(len(rows), dtype=torch.int64)

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(weights)


class Update(NamedTuple):
    """The facts of a client update that decide its costs."""

    rows: int
    """The training rows of the client."""
    first: bool
    """True if the client has not completed any update yet."""
    round: int
    """The round, from 0."""
    found: int = -1
    """The round in which the client's mask was found; -1 for its first mask."""
    changes: bool = True
    """True if a mask search changes the mask."""
    stale: bool = False
    """True if a mask that all clients share has changed since the client's last update."""
    prepares: bool = False
    """True for the step before round 1."""


@dataclass(frozen=True)
class UpdateCosts:
    """Counts the costs of one client's update."""

    method: Method
    space: ParameterSpace
    """The space of the tensors that travel."""
    training: TrainingSettings
    public: tuple[int, int] = (0, 0)
    """See `Initial`."""
    fill: Fill | None = None
    """Divides a total of active parameters among tensors, if the searcher's plan has no counts of tensors."""

    def __call__(self, network: NetworkCosts, update: Update) -> Costs:
        """The costs of an update."""
        return self._perform(network, update)[0].costs

    def messages(self, network: NetworkCosts, prepares: bool = False) -> tuple[tuple[int, int], int]:
        """The parts that all updates' messages have in common.

        These are the numbers of values in further tensors that travel to a client and with its update, and the number
        of messages with weights.
        """
        result, server = self._perform(network, Update(1, first=True, round=0, prepares=prepares))
        sides = server.further if self.method.sends else {}, result.update.tensors
        down, up = (sum(tensor.numel() for tensor in tensors.values()) for tensors in sides)
        received = (server.neighbours or 1) if self.method.sends and self.method.sends_weights else 0
        return (down, up), received + (result.update.update is not None)

    def counts(self, network: NetworkCosts, round: int) -> tuple[int, ...]:
        """The active parameters of each tensor that travels, under a mask that is found in a round."""
        parameters = self.space.parameters.sizes
        counts = counts_by_tensor(
            self.method.searcher.counts(round), self.fill or costliest, parameters, network
        )
        return (*counts, *self.space.running.sizes)

    def shape(self, network: NetworkCosts, round: int) -> tuple[int, ...]:
        """For each tensor under such a mask: 0, empty; 1, in between; 2, full. () for a method without masks."""
        if not self.method.uses_mask:
            return ()
        counts = zip(self.counts(network, round), network.sizes, strict=True)
        return tuple((count > 0) + (count == size) for count, size in counts)

    def _perform(self, network: NetworkCosts, update: Update) -> tuple[CompletedUpdate, ServerState]:
        """An update, and the server state that it starts from."""
        method: Any = copy.copy(self.method)
        full = PackedMask.pack(torch.ones(self.space.total))
        known = full
        if method.uses_mask:
            searcher = method.searcher = copy.copy(method.searcher)
            before, after = (
                self._mask(self.counts(network, round)) for round in (update.found, update.round)
            )
            known, found = PackedMask.pack(before), after[: self.space.trained]
            searcher.first_mask = lambda search: found
            searcher.next_mask = lambda search: found if update.changes else search.mask
        setup = ClientSetup(
            seed=0,
            training=self.training,
            engine=CountingEngine(self.space, self.training, self.public[1]),
            network=network,
            client_rows=[np.zeros(update.rows, np.int64)],
            initial=torch.zeros(self.space.total),
            public=torch.zeros(self.public[0], dtype=torch.int64),
        )
        runner = ClientRunner(setup=setup, method=method, messages=Messages(network, seed=0), evaluators=[])
        finds = update.first and method.finds_first_mask
        initial = Initial(setup.engine.weights, lambda client: full if finds else known, full, self.public)
        state, server = runner.first_state(0, initial), method.server_init(initial)
        if server.mask is not None and not update.prepares:
            server = replace(server, tensors={**server.tensors, MASK: known.bits})
            if update.stale or not update.first:
                state |= {MASK: full if update.stale else known}
        job = UpdateJob(update.round, client=0, first=update.first, state=state, prepares=update.prepares)
        result = runner.perform(job, server)
        assert isinstance(result, CompletedUpdate)
        return result, server

    def _mask(self, counts: Sequence[int]) -> torch.Tensor:
        """A mask [total] with these counts: float32."""
        mask = torch.ones(self.space.total)
        for piece, count in zip(self.space.split(mask), counts, strict=True):
            piece[count:] = 0
        return mask


class OtherMask(Exception):
    """An update counts a mask that is neither the planned one nor full or empty."""


@dataclass(frozen=True)
class SummedCosts(NetworkCosts):
    """The costs of a network in which other counts stand in for those of one mask.

    FLOPs and values are linear in the counts. So sums of counts give the costs of many masks by one update.
    """

    mask: tuple[int, ...] = ()
    """The active parameters of each tensor under the mask."""
    instead: tuple[int, ...] = ()

    def forward_flops(self, active: Sequence[int] | None = None) -> int | None:
        return super().forward_flops(self._replaced(active))

    def value_bytes(self, active: Sequence[int] | None = None) -> int:
        return super().value_bytes(self._replaced(active))

    def _replaced(self, active: Sequence[int] | None) -> Sequence[int] | None:
        """The counts that stand in for these. Raises `OtherMask` if that is not known."""
        if active == self.mask:
            return self.instead
        if active is None or active == self.sizes or not any(active):
            return active
        raise OtherMask


Fill: TypeAlias = Callable[[int, Sequence[int], NetworkCosts], list[int]]
"""Divides a total of active parameters among tensors of these sizes."""


def counts_by_tensor(
    counts: Counts, fill: Fill, sizes: Sequence[int], network: NetworkCosts
) -> Sequence[int]:
    """The count of each tensor. `fill` divides the total if only that is known, or nothing."""
    if isinstance(counts, Sequence):
        return counts
    return fill(sum(sizes) if counts is None else counts, sizes, network)


def costliest(total: int, sizes: Sequence[int], network: NetworkCosts) -> list[int]:
    """The counts with the most FLOPs: tensors whose parameters are used at the most positions come first."""
    return _filled(total, (sorted(range(len(sizes)), key=lambda i: -network.flops_per_active[i]), sizes))


def most_mixed(total: int, sizes: Sequence[int], network: NetworkCosts) -> list[int]:
    """The counts with the longest mask: as many tensors as possible are neither full nor empty, large ones first."""
    large = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    one, but_one = ([min(1, size) for size in sizes], [size - 1 for size in sizes])
    return _filled(total, (large, one), (large, but_one), (large[::-1], sizes))


def _filled(total: int, *stages: tuple[Sequence[int], Sequence[int]]) -> list[int]:
    """Divide a total. In each stage every tensor, in an order, gets as much as its limit allows."""
    counts = [0] * len(stages[0][0])
    for order, limits in stages:
        for i in order:
            more = min(max(limits[i] - counts[i], 0), total)
            counts[i] += more
            total -= more
    return counts


def most(costs: Sequence[Costs]) -> Costs:
    """The largest of each kind of costs; None if one of them is unknown."""
    kinds: list[Any] = [
        None if None in values else max(values) for values in zip(*map(astuple, costs), strict=True)
    ]
    return Costs(*kinds)
