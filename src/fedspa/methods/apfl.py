"""APFL (Deng et al., 2020): a personal model that is a mixture of a shared and a local one, trained side by side.

On each batch w <- w - lr grad f(w), and v takes a step of the loss of the mixture alpha v + (1 - alpha) w. Both
gradients are taken at the weights before the step (paper, Algorithm 1). The paper mixes weights, its code outputs; see
`mixes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from fedspa.core.client import Client, ClientUpdate, Initial, Mixture
from fedspa.core.client_state import ClientState
from fedspa.core.limits import limited
from fedspa.core.server import ServerState
from fedspa.data.examples import Batch
from fedspa.methods.fedavg import FedAvg
from fedspa.training.base import LocalTask
from fedspa.training.local_training import LocalTraining
from fedspa.training.optimizers import make_optimizer


class MixedTraining(LocalTraining):
    """Trains w as the network; v and alpha are the further tensors "personal" [total] and "alpha" [1]."""

    method: APFL

    def begin(self, task: LocalTask) -> None:
        super().begin(task)
        if not self.others:  # fine-tuning: plain steps of w
            return
        personal = self.others["personal"].split([self.space.trained, self.space.total - self.space.trained])
        self.v = (nn.Parameter(personal[0]), personal[1])  # views: steps change the further tensor
        self.v_optimizer = make_optimizer(self.settings, self.v[0], task.learning_rate)
        self.adapts = self.method.adaptive  # once an update, on its first batch

    def training_step(self, batch: Batch, batch_idx: int = 0) -> torch.Tensor:
        outputs = self.network(batch.inputs)
        if self.others:
            self._step_of_v(batch, outputs.detach())
        return self.objective.loss(outputs, batch.targets)

    def _step_of_v(self, batch: Batch, outputs: torch.Tensor) -> None:
        """Take a step of v, and of alpha. `outputs` [B, ...] are those of w before its step."""
        v, alpha = self.v[0], self.others["alpha"].clone().requires_grad_(self.adapts)
        v.grad = None
        if self.method.mixes == "outputs":
            mixed = alpha * self._outputs(v, batch) + (1 - alpha) * outputs
        else:
            mixed = self._outputs(alpha * v + (1 - alpha) * self.weights.detach(), batch)
        self.objective.loss(mixed, batch.targets).backward()
        assert v.grad is not None
        self.finish_gradient(v.grad, None)
        self.v_optimizer.step()
        if alpha.grad is not None:
            lr = self.v_optimizer.param_groups[0]["lr"]
            self.others["alpha"] = (alpha.detach() - lr * alpha.grad).clamp(0, 1)
            self.adapts = False

    def _outputs(self, parameters: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The outputs of the network with these parameters [trained], and the running statistics of v."""
        tensors = {
            **dict(self.space.parameters.items(parameters)),
            **dict(self.space.running.items(self.v[1])),
        }
        return functional_call(self.network, tensors, (batch.inputs,))


@dataclass(kw_only=True)
class APFL(FedAvg):
    """APFL. The personal model mixes the client's v with the newest w of the server."""

    weighting: str = "uniform"
    alpha: float = limited(0.5, low=0, high=1)
    """The initial share of v in the mixture."""
    adaptive: bool = False
    """True if alpha takes a step of gradient descent at each update."""
    mixes: str = limited("outputs", choices=("outputs", "weights"))
    """The mixed quantity: outputs (published code), or weights (paper)."""

    training_class = MixedTraining

    def client_init(self, client: int, initial: Initial) -> ClientState:
        """v starts at w_0."""
        return ClientState(personal=initial.weights)

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        others = {"personal": client.state.tensor("personal"), "alpha": self._alpha(client.state)}
        trained = client.train(client.weights, others=others, further_passes=3)
        return ClientUpdate(
            update=client.weights - trained.weights,
            state=ClientState(trained.others),
            local=trained.weights,
        )

    def personal(self, weights: torch.Tensor, state: ClientState) -> torch.Tensor | Mixture:
        alpha = float(self._alpha(state))
        if self.mixes == "outputs":
            return Mixture(state.tensor("personal"), weights, alpha)
        return torch.lerp(weights, state.tensor("personal"), alpha)

    def _alpha(self, state: ClientState) -> torch.Tensor:
        """The alpha [1] of a client."""
        return (
            state.tensor("alpha") if "alpha" in state else state.tensor("personal").new_full((1,), self.alpha)
        )
