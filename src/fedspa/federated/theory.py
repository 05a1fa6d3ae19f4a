"""The quantities of the paper's Theorem 1, measured along a run.

The theorem bounds the squared norm of the gradient of the SPFL objective f (paper, P2). Its personal masks
m*_k are taken to be the final masks of the run. So some rounds are recorded during the run, and evaluated
when the final masks are known. Gradients are over all of a client's training rows, without augmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from fedspa.core.client_state import ClientState
from fedspa.core.packed_mask import PackedMask
from fedspa.core.records import TheoryRow
from fedspa.federated.jobs import CompletedUpdate, UpdateJob
from fedspa.training.base import Engine

Start: TypeAlias = Callable[[torch.Tensor, ClientState], torch.Tensor]
"""Gives the start [total] of a client's training, from the global weights [total] and its state."""


class _Update(NamedTuple):
    """A client update: the client, its mask and state before and its mask after it, and the weights at its end."""

    client: int
    mask: PackedMask
    state: ClientState
    next_mask: PackedMask
    local: torch.Tensor


class _RecordedRound(NamedTuple):
    """A recorded round: the global weights w_t [total], and the client updates that started from them."""

    weights: torch.Tensor
    updates: list[_Update]


class TheoremCurves:
    """Records every n-th round of a run with masks, and computes the curves from them."""

    def __init__(self, every: int, start: Start) -> None:
        """
        Args:
            every: the number of rounds from one recorded round to the next. Each needs memory for the global weights
                and the local weights of all its participants.
            start: the start [total] of a client's training, from w_t and its state.
        """
        self._every, self._start = every, start
        self._moments: dict[int, _RecordedRound] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"moments": dict(self._moments)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        def copied(item: Any) -> Any:
            if isinstance(item, dict):
                return ClientState({name: copied(part) for name, part in item.items()})
            return item.clone() if isinstance(item, torch.Tensor | PackedMask) else item

        self._moments = {
            int(t): _RecordedRound(weights.clone(), [_Update(*map(copied, update)) for update in updates])
            for t, (weights, updates) in state["moments"].items()
        }

    def remember(self, job: UpdateJob, weights: torch.Tensor, result: CompletedUpdate) -> None:
        """Record an update that started from the global weights w_t [total]."""
        if job.round % self._every:
            return
        moment = self._moments.setdefault(job.round, _RecordedRound(weights.cpu(), []))
        state, update = job.state, result.update
        assert update.state is not None and update.local is not None
        mask, next_mask = state.mask, update.state.mask
        assert mask is not None and next_mask is not None
        if update.mask is not None and (trained := PackedMask.pack(update.mask).on_cpu()) != mask:
            mask, state = trained, update.state  # this update found the mask before its training
        moment.updates.append(_Update(job.client, mask, state, next_mask, update.local.cpu()))

    def rows(
        self,
        engine: Engine,
        client_rows: Sequence[np.ndarray],
        final: Callable[[int], PackedMask],
        clients: Sequence[int],
    ) -> list[TheoryRow]:
        """The points of the curves, one for each recorded round.

        Args:
            client_rows: int64, the training rows of each client.
            final: the final mask m*_k of client k.
            clients: the clients of the objective's mean: all, or a sample of very many.
        """
        evaluation = _Evaluation(engine, client_rows, final, clients, self._start)
        return [evaluation.row(t, moment) for t, moment in sorted(self._moments.items())]


@dataclass(frozen=True)
class _Evaluation:
    """Computes the curves when the final masks are known."""

    engine: Engine
    client_rows: Sequence[np.ndarray]
    final: Callable[[int], PackedMask]
    clients: Sequence[int]
    start: Start

    def row(self, t: int, moment: _RecordedRound) -> TheoryRow:
        """The quantities of a recorded round."""
        weights = moment.weights.to(self.engine.device)
        trained = {update.client for update in moment.updates}
        references = {}
        objective = torch.zeros_like(weights)
        for client in self.clients:
            mask, gradient = self._reference(client, weights)
            objective += mask * gradient / len(self.clients)
            if client in trained:
                references[client] = mask, gradient
        ratios: list[float] = []
        for update in moment.updates:
            if update.client not in references:
                references[update.client] = self._reference(update.client, weights)
            ratios += self._ratios(update, weights, *references[update.client])
        steps = [distance(update.mask, update.next_mask) for update in moment.updates]
        lefts = [distance(update.mask, self.final(update.client)) for update in moment.updates]
        return TheoryRow(
            round=t,
            gradient_norm_sq=float(objective.square().sum()),
            mask_step=float(np.mean(steps)),
            mask_to_final=float(np.mean(lefts)),
            p=max(ratios, default=None),
        )

    def _reference(self, client: int, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The final mask m*_k, and the gradient of F_k at m*_k * w_t."""
        mask = self.final(client).unpack(like=weights)
        return mask, self._gradient(client, mask * weights)

    def _ratios(
        self, update: _Update, weights: torch.Tensor, final_mask: torch.Tensor, reference: torch.Tensor
    ) -> Iterator[float]:
        """p_t at the first and the last point of a client update. A point equal to the reference gives no value."""
        mask = update.mask.unpack(like=weights)
        start = self.start(weights, update.state.to(weights.device))
        for point in (start, update.local.to(weights)):
            gradient = self._gradient(update.client, point)
            moved = (gradient - reference).square().sum()
            if moved > 0:
                yield float((mask * gradient - final_mask * reference).square().sum() / moved)

    def _gradient(self, client: int, point: torch.Tensor) -> torch.Tensor:
        return self.engine.full_gradient(point, torch.from_numpy(self.client_rows[client]))


def distance(one: PackedMask, other: PackedMask) -> float:
    """The share of the coordinates in which two masks differ."""
    return int(np.bitwise_count(one.bits.numpy() ^ other.bits.numpy()).sum()) / one.length
