"""SGD on the server, without momentum (FedAvg) or with it (FedAvgM: Hsu, Qi and Brown, 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedspa.core.limits import limited
from fedspa.server_optimizers.base import ServerOptimizer

if TYPE_CHECKING:
    import torch

VELOCITY = "server_velocity"


@dataclass(kw_only=True)
class ServerSGD(ServerOptimizer):
    """v <- momentum * v + mean update; w <- w - lr * v."""

    momentum: float = limited(0.0, low=0, high=1, high_open=True)

    def moments(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        return {VELOCITY: weights.new_zeros(len(weights))} if self.momentum else {}

    def direction(
        self, update: torch.Tensor, moments: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if not self.momentum:
            return update, {}
        velocity = self.momentum * moments[VELOCITY] + update
        return velocity, {VELOCITY: velocity}
