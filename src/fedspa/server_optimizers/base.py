"""The base class of server optimizers: the mean update serves as a gradient (Reddi et al., 2021, Algorithm 1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedspa.core.limits import Component, limited
from fedspa.core.server import Aggregate, ServerState

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class ServerOptimizer(Component, ABC):
    """Updates the parameters. Running statistics, which follow them, take the plain mean."""

    section: ClassVar[str] = "server_optimizer"
    lr: float = limited(1.0, low=0, low_open=True)
    """The server's learning rate."""

    def moments(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """The optimizer's tensors before round 1, by name, for weights [total]. They stay at the server."""
        return {}

    @abstractmethod
    def direction(
        self, update: torch.Tensor, moments: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The step direction [total], which is multiplied by lr and subtracted from the weights, and the next moments.

        `update` [total]: the mean of start - end over the participants (paper, Eq. 4).
        """

    def step(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """The server after a round; unchanged if no weights were sent."""
        if aggregate.update is None:
            return server
        direction, moments = self.direction(aggregate.update, server.kept)
        trained = aggregate.space.trained
        weights = server.weights - (direction if self.lr == 1 else self.lr * direction)
        if trained < len(weights):
            weights[trained:] = server.weights[trained:] - aggregate.update[trained:]
        return ServerState(weights, server.tensors, {**server.kept, **moments})
