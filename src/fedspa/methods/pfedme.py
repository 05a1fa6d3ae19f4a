"""pFedMe (Dinh et al., 2020): the clients' personal models are the proximal points of the weights that they send.

On each batch theta takes `steps` steps theta <- theta - lr (g + strength (theta - w_k)), then
w_k <- w_k - outer_lr strength (w_k - theta) (paper, Algorithm 1). The personal model is theta.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedspa.core.client import Client, ClientUpdate
from fedspa.core.client_state import ClientState
from fedspa.core.limits import limited
from fedspa.core.server import ServerState
from fedspa.data.examples import Batch
from fedspa.methods.base import PersonalMethod
from fedspa.methods.fedavg import FedAvg
from fedspa.training.local_training import LocalTraining


class MoreauTraining(LocalTraining):
    """Trains theta as the network; w_k is the further tensor "outer" [total]."""

    method: PFedMe

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        if not self.others:  # fine-tuning: plain steps
            return
        assert self.weights.grad is not None
        outer = self.others["outer"][: len(self.weights)]
        self.weights.grad.add_(self.weights - outer, alpha=self.method.strength)

    def step_on(
        self, batch: Batch, optimizer: torch.optim.Optimizer, backward: Callable[[Batch], torch.Tensor]
    ) -> torch.Tensor:
        if not self.others:
            return super().step_on(batch, optimizer, backward)
        for _ in range(self.method.steps):
            loss = super().step_on(batch, optimizer, backward)
        outer = self.others["outer"]
        outer.sub_(outer - self.vector, alpha=self.method.outer_lr * self.method.strength)
        return loss


@dataclass(kw_only=True)
class PFedMe(FedAvg, PersonalMethod):
    """pFedMe. The paper's beta is the lr of the server optimizer. theta starts at w_t in each update."""

    weighting: str = "uniform"
    steps: int = limited(5, low=1)
    """K: the steps of theta on each batch. Each costs as much as one step of FedAvg."""
    strength: float = limited(15.0, low=0, low_open=True)
    """lambda, the strength of the pull of theta towards w_k."""
    outer_lr: float = limited(0.005, low=0, low_open=True)
    """eta, the learning rate of w_k. The one of theta is training.lr."""

    label: ClassVar[str] = "pFedMe"
    training_class = MoreauTraining
    own_proximal: ClassVar[str] = "method.strength"

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        passes = 3 * (self.steps - 1)
        theta = client.train(client.weights, others={"outer": client.weights}, further_passes=passes)
        outer = theta.others["outer"]
        return ClientUpdate(
            update=client.weights - outer, state=ClientState(weights=theta.weights), local=outer
        )
