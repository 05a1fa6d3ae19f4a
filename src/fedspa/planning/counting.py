"""Costs before a run: the method's own code, with an engine that counts instead of training.

Whatever the method asks for and sends is charged as in a run. Weights and gradients are zeros; masks have the counts
that the layer sparsity asks for.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedspa.core.client import Initial, Trained
from fedspa.core.packed_mask import PackedMask
from fedspa.core.records import Costs
from fedspa.core.server import ServerState
from fedspa.core.settings import TrainingSettings
from fedspa.core.weights import ParameterSpace
from fedspa.costs.network import NetworkCosts
from fedspa.federated.client import ClientSetup
from fedspa.federated.client_runner import ClientRunner
from fedspa.federated.jobs import CompletedUpdate, UpdateJob
from fedspa.federated.messages import Messages
from fedspa.methods.base import Method
from fedspa.training.base import LocalTask


@dataclass
class CountingEngine:
    """An `Engine` that computes nothing: training gives the weights back, gradients are zero."""

    space: ParameterSpace
    training: TrainingSettings
    name: str = "counting"
    forks: bool = False
    compile_seconds: float = 0.0
    device: torch.device = torch.device("cpu")
    instead_of: dict[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> torch.Tensor:
        return torch.zeros(self.space.total)

    def train(self, task: LocalTask) -> Trained:
        samples = self.training.samples(len(task.rows), task.epochs)
        return Trained(task.weights, torch.zeros((), dtype=torch.float64), samples)

    def gradient(self, weights: torch.Tensor, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return torch.zeros_like(weights)

    def accuracy(self, weights: torch.Tensor, rows: torch.Tensor) -> float:
        return 0.0

    def predict(
        self, weights: torch.Tensor, examples: Any, rows: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        return torch.zeros(len(rows), dtype=torch.int64)

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(weights)


@dataclass(frozen=True)
class UpdateCosts:
    """Counts what one client's update costs."""

    method: Method
    space: ParameterSpace
    """Of the tensors that travel."""
    training: TrainingSettings
    active: Sequence[int]
    """Active parameters of each tensor that travels, in the model that a client trains."""

    def __call__(
        self, network: NetworkCosts, rows: int, *, round: int, first: bool, prepares: bool = False
    ) -> Costs:
        """The costs of an update of a client of so many training rows in a round (from 0).

        Args:
            first: whether the client has not completed any update yet.
            prepares: whether it is the step before round 1.
        """
        return self._perform(network, rows, round, first, prepares)[0].costs

    def further_values(self, network: NetworkCosts) -> tuple[int, int]:
        """How many values of further tensors travel to a client, and how many with its update."""
        result, server = self._perform(network, rows=1, round=0, first=True)
        sides = server.tensors if self.method.sends else {}, result.update.tensors
        down, up = (sum(tensor.numel() for tensor in tensors.values()) for tensors in sides)
        return down, up

    def _perform(
        self, network: NetworkCosts, rows: int, round: int, first: bool, prepares: bool = False
    ) -> tuple[CompletedUpdate, ServerState]:
        """An update, and the server that it starts from."""
        setup = ClientSetup(
            seed=0,
            training=self.training,
            engine=CountingEngine(self.space, self.training),
            network=network,
            client_rows=[np.zeros(rows, np.int64)],
            target_counts=self.active,
        )
        runner = ClientRunner(
            setup=setup, method=self._method, messages=Messages(network, seed=0), evaluators=[]
        )
        weights, full = setup.engine.weights, PackedMask.pack(torch.ones(self.space.total))
        finds = first and self.method.finds_first_mask
        initial = Initial(weights, lambda client: full if finds else PackedMask.pack(self._mask), full)
        job = UpdateJob(round, client=0, first=first, state=runner.first_state(0, initial), prepares=prepares)
        server = self.method.server_init(initial)
        result = runner.perform(job, server)
        assert isinstance(result, CompletedUpdate)
        return result, server

    @property
    def _mask(self) -> torch.Tensor:
        """A mask [total] with the planned counts: float32."""
        mask = torch.zeros(self.space.total)
        for piece, count in zip(self.space.split(mask), self.active, strict=True):
            piece[:count] = 1
        return mask

    @property
    def _method(self) -> Method:
        """The method, whose searcher gives masks of the planned counts without looking at values.

        Where it would not search, it gives the client's own mask back, as in a run: that one does not travel.
        """
        if not self.method.uses_mask:
            return self.method
        method: Any = copy.copy(self.method)
        searcher = method.searcher = copy.copy(method.searcher)
        found = self._mask[: self.space.trained]
        searcher.first_mask = lambda search: found
        searcher.next_mask = lambda search: (
            found if searcher.searches and searcher.searching(search.round) else search.mask
        )
        return method
