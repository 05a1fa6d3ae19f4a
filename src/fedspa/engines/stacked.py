"""The stacked engine: several clients advance in lockstep, their weights the rows of one matrix (torch.func.vmap).

It pays where a network is so small that one client's batch does not fill a GPU. A CPU gains nothing from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from fedspa.data.batches import Pixels
from fedspa.engines.eager import EagerEngine
from fedspa.engines.flat import first_batch, gradient_and_loss, plan_visit, sgd_step
from fedspa.errors import UserError
from fedspa.requests import Answer, Gradient, Request, Train, Trained
from fedspa.weights import ParameterSpace


class StackedEngine:
    """Draws each client's batches as the eager engine does, and takes its steps; only sums differ, by rounding."""

    name = "stacked"
    compile_seconds = 0.0

    def __init__(self, eager: EagerEngine, clients: int) -> None:
        """
        Args:
            eager: holds the network, and does what concerns one model alone.
            clients: how many advance together at most; memory for activations grows with them.

        Raises `UserError` for a network that cannot be stacked.
        """
        self._eager, self.together = eager, clients
        self._module, self._pixels, self._settings = eager.module, eager.pixels, eager.settings
        self._gradients = vmap(gradient_and_loss(eager.module, eager.space))
        self._check()

    @property
    def space(self) -> ParameterSpace:
        return self._eager.space

    @property
    def device(self) -> torch.device:
        return self._eager.device

    @property
    def weights(self) -> torch.Tensor:
        return self._eager.weights

    def predict(
        self, weights: torch.Tensor, pixels: Pixels, rows: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        return self._eager.predict(weights, pixels, rows, batch_size)

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._eager.full_gradient(weights, rows)

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Training and gradients for all at once; requests that differ in their learning rate in groups."""
        groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[_alike(request)].append(index)
        answers: dict[int, Answer] = {}
        for indices in groups.values():
            answers.update(zip(indices, self._answer([requests[index] for index in indices]), strict=True))
        return [answers[index] for index in range(len(requests))]

    def _answer(self, requests: Sequence[Request]) -> Sequence[Answer]:
        if trainings := [request for request in requests if isinstance(request, Train)]:
            return self._train(trainings)
        if gradients := [request for request in requests if isinstance(request, Gradient)]:
            return self._gradient(gradients)
        return self._eager.answer(requests)

    @torch.no_grad()
    def _train(self, requests: Sequence[Train]) -> list[Trained]:
        """Clients that have more batches come first: whoever has no batch left drops out of the stack's end."""
        plans = [plan_visit(self._pixels, request, self._settings) for request in requests]
        order = sorted(range(len(requests)), key=lambda index: -len(plans[index]))
        asked = [requests[index] for index in order]
        steps = [len(plans[index]) for index in order]
        schedule = pad_sequence([plans[index] for index in order])  # [steps, clients, batch, 1 or 6]
        counts = (schedule[..., 0] >= 0).sum(2)  # real images of each batch; of padded steps meaningless
        fullest = [int(row[: _longer(steps, step)].max()) for step, row in enumerate(counts)]
        samples = [int(counts[:own, place].sum()) for place, own in enumerate(steps)]
        schedule, counts = schedule.to(self.device), counts.to(self.device)

        weights = torch.stack([request.weights for request in asked])
        masks = _stack([request.mask for request in asked])
        anchors = _stack([request.pull.anchor if request.pull else None for request in asked])
        pull, rate = asked[0].pull, asked[0].learning_rate
        velocity = torch.zeros_like(weights) if self._settings.momentum else None
        losses = torch.zeros(len(asked), device=self.device, dtype=torch.float64)
        self._module.train()
        for step, size in enumerate(fullest):
            width = _longer(steps, step)
            gradients, loss = self._backward(weights[:width], schedule[step, :width, :size])
            losses[:width] += loss * counts[step, :width]
            self._module.clip_and_mask(gradients, None if masks is None else masks[:width])
            moving = None if velocity is None else velocity[:width]
            sgd_step(weights[:width], gradients, moving, rate, self._settings)
            if pull is not None and anchors is not None:
                weights[:width].lerp_(anchors[:width], rate * pull.strength)
        answers: dict[int, Trained] = {}
        for place, index in enumerate(order):
            answers[index] = Trained(weights[place].clone(), losses[place] / samples[place], samples[place])
        return [answers[index] for index in range(len(requests))]

    def _gradient(self, requests: Sequence[Gradient]) -> list[torch.Tensor]:
        self._module.train()
        size = min(self._settings.batch_size, max(len(request.rows) for request in requests))
        parts = torch.stack(
            [first_batch(self._pixels, request.rows, request.generator, size) for request in requests]
        )
        weights = torch.stack([request.weights for request in requests])
        return [gradient.clone() for gradient in self._backward(weights, parts)[0]]

    def _backward(self, weights: torch.Tensor, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients [clients, total] and losses [clients] of batches int64 [clients, B, 1 or 6]."""
        clients, size, columns = parts.shape
        batch = self._pixels.filled_up(parts.to(self.device).reshape(-1, columns))
        images = batch.images.unflatten(0, (clients, size))
        with self._eager.fabric.autocast():
            return self._gradients(weights, images, batch.labels.view(clients, size))

    def _check(self) -> None:
        """Stack two clients of one image each, to see whether torch can."""
        weights = self.weights.expand(2, -1)
        part = self._pixels.plan(torch.zeros(1, dtype=torch.int64), torch.Generator())
        self._module.train()
        try:
            self._backward(weights, part.expand(2, -1, -1))
        except RuntimeError as error:
            random = "random operation" in str(error)
            reason = (
                "draws random numbers as it trains (dropout?), and clients in a stack cannot draw each its own"
                if random
                else f"torch.func.vmap cannot run: {str(error).splitlines()[0]}"
            )
            raise UserError(
                f"engine=stacked cannot train a model that {reason}; use engine=eager."
            ) from error


def _alike(request: Request) -> tuple[object, ...]:
    """Equal for requests that can be answered in one stack."""
    if not isinstance(request, Train):
        return ()
    pull = request.pull and request.pull.strength
    return request.learning_rate, request.mask is None, pull


def _longer(steps: Sequence[int], step: int) -> int:
    """How many clients, in order of falling numbers of steps, still have a step of that number."""
    return sum(own > step for own in steps)


def _stack(vectors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """[clients, total], or None where there are none."""
    present = [vector for vector in vectors if vector is not None]
    return torch.stack(present) if present else None
