"""FedAdam, FedYogi and FedAdagrad (Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2).

m <- beta1 m + (1 - beta1) g; v by the rule of each optimizer; w <- w - lr m / (sqrt(v) + tau), where g is the mean
update. There is no bias correction, as in the paper; v starts at tau^2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedspa.core.limits import limited
from fedspa.server_optimizers.base import ServerOptimizer

if TYPE_CHECKING:
    import torch

FIRST, SECOND = "server_first_moment", "server_second_moment"


@dataclass(kw_only=True)
class Adaptive(ServerOptimizer):
    """The shared part of the three optimizers."""

    lr: float = 0.01
    beta1: float = limited(0.9, low=0, high=1, high_open=True)
    tau: float = limited(1e-3, low=0, low_open=True)
    """The adaptivity. A smaller tau makes the steps of the coordinates more equal."""

    def moments(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            FIRST: weights.new_zeros(len(weights)),
            SECOND: weights.new_full((len(weights),), self.tau**2),
        }

    def direction(
        self, update: torch.Tensor, moments: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        first = self.beta1 * moments[FIRST] + (1 - self.beta1) * update
        second = self.second_moment(moments[SECOND], update.square())
        return first / (second.sqrt() + self.tau), {FIRST: first, SECOND: second}

    @abstractmethod
    def second_moment(self, second: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """The next v [total], from v and the squares of the mean update."""


@dataclass(kw_only=True)
class ServerAdagrad(Adaptive):
    """v <- v + g^2."""

    beta1: float = 0.0

    def second_moment(self, second: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return second + square


@dataclass(kw_only=True)
class ServerAdam(Adaptive):
    """v <- beta2 v + (1 - beta2) g^2."""

    beta2: float = limited(0.99, low=0, high=1, high_open=True)

    def second_moment(self, second: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return self.beta2 * second + (1 - self.beta2) * square


@dataclass(kw_only=True)
class ServerYogi(ServerAdam):
    """v <- v - (1 - beta2) g^2 sign(v - g^2)."""

    def second_moment(self, second: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return second - (1 - self.beta2) * square * (second - square).sign()
