"""The stacked engine: several clients advance in lockstep, their weights the rows of one matrix (torch.func.vmap).

It pays where a network is so small that one client's batch does not fill a GPU, and clients have about as many batches:
all wait for the longest. A CPU gains nothing from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch.func import vmap

from fedspa.engines.choice import Workload
from fedspa.engines.eager import EagerEngine
from fedspa.engines.flat import first_batch, gradient_and_loss, plan_visit
from fedspa.engines.over_eager import OverEager
from fedspa.engines.step import sent
from fedspa.errors import UserError, brief
from fedspa.rounds.requests import Gradient, Train, Trained

T = TypeVar("T")


class StackedEngine(OverEager):
    """Draws each client's batches as the eager engine does, and takes its steps; only sums differ, by rounding."""

    name = "stacked"

    def __init__(self, eager: EagerEngine, workload: Workload, clients: int, compiler: str | None) -> None:
        """As for `OverEager`; `clients`: how many advance together at most; memory for activations grows with them.

        Raises `UserError` for a network that cannot be stacked.
        """
        _check(eager)
        super().__init__(eager, workload, compiler, lanes=clients)
        self.clients_at_once = clients

    def _train(self, requests: Sequence[Train]) -> list[Trained]:
        """Up to a stack at once; those that differ in their learning rate or pull in groups."""
        groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[request.learning_rate, request.pull and request.pull.strength].append(index)
        trained: dict[int, Trained] = {}
        for alike in groups.values():
            for indices in self._stacks(alike):
                answers = self._trained([requests[index] for index in indices])
                trained.update(zip(indices, answers, strict=True))
        return [trained[index] for index in range(len(requests))]

    def _gradients(self, requests: Sequence[Gradient]) -> list[torch.Tensor]:
        """Up to a stack at once."""
        return [gradient for stack in self._stacks(requests) for gradient in self._gradients_of(stack)]

    def _stacks(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        return (
            items[first : first + self.clients_at_once]
            for first in range(0, len(items), self.clients_at_once)
        )

    def _trained(self, requests: Sequence[Train]) -> list[Trained]:
        step, settings = self._step, self._eager.settings
        plans = [plan_visit(self._eager.pixels, request, settings) for request in requests]
        samples = [int((plan[:, :, 0] >= 0).sum()) for plan in plans]
        self._eager.module.train()
        step.start(requests)
        for parts in sent(self._side_by_side([plan[:, : step.batch_size] for plan in plans]), self.device):
            step.part.copy_(parts)
            step.take_step()
        return [
            Trained(step.weights[lane].clone(), step.loss_sum[lane] / count, count)
            for lane, count in enumerate(samples)
        ]

    def _gradients_of(self, requests: Sequence[Gradient]) -> list[torch.Tensor]:
        step, pixels = self._step, self._eager.pixels
        batches = [
            first_batch(pixels, request.rows, request.generator, step.batch_size)[None]
            for request in requests
        ]
        self._eager.module.train()
        for lane, request in enumerate(requests):
            step.weights[lane].copy_(request.weights)
        step.part.copy_(sent(self._side_by_side(batches), self.device)[0])
        step.take_gradient()
        return [step.gradient[lane].clone() for lane in range(len(requests))]

    def _side_by_side(self, plans: Sequence[torch.Tensor]) -> torch.Tensor:
        """Clients' batches [steps, B, 1 or 6] as those of the lanes, [steps, lanes, B, 1 or 6]; the rest is filling."""
        steps = max(map(len, plans))
        together = torch.zeros((steps, *self._step.part.shape), dtype=torch.int64)
        together[..., 0] = -1
        for lane, plan in enumerate(plans):
            together[: len(plan), lane] = plan
        return together


def _check(eager: EagerEngine) -> None:
    """Stack two clients of one image each, to see whether torch can. Raises `UserError` where it cannot."""
    if eager.space.statistics:
        raise UserError(
            "engine=stacked fills the clients' batches up to one size, which would count in the averages of BatchNorm: "
            "use engine=eager, or model.batchnorm=groupnorm."
        )
    part = eager.pixels.plan(torch.zeros(2, dtype=torch.int64), torch.Generator()).to(eager.device)
    batch = eager.pixels.planned(part)
    images, labels = batch.images.unflatten(0, (2, 1)), batch.labels.view(2, 1)
    eager.module.train()
    try:
        with eager.fabric.autocast():
            vmap(gradient_and_loss(eager.module, eager.space))(eager.weights.expand(2, -1), images, labels)
    except RuntimeError as error:
        random = "random operation" in str(error)
        reason = (
            "draws random numbers as it trains (dropout?), and clients in a stack cannot draw each its own"
            if random
            else f"torch.func.vmap cannot run: {brief(error)}"
        )
        raise UserError(f"engine=stacked cannot train a model that {reason}; use engine=eager.") from error
