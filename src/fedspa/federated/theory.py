"""The quantities of the paper's Theorem 1, measured along a run.

The theorem bounds the squared norm of the gradient of the SPFL objective f (paper, P2), whose personal masks
m*_k are taken to be those that the run ends with. So some rounds are remembered while the run goes on, and
looked at when its masks are final. Gradients are over all of a client's training rows, without augmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedspa.core.client_state import ClientState
from fedspa.core.packed_mask import PackedMask
from fedspa.core.records import TheoryRow
from fedspa.core.saved import Saved
from fedspa.federated.client_states import at_hand
from fedspa.federated.jobs import CompletedUpdate, UpdateJob
from fedspa.training.base import Engine


@dataclass(frozen=True)
class _Visited:
    """A visit as remembered: its client, the mask before and after, and the weights it ended with and began with."""

    client: int
    mask: PackedMask
    next_mask: PackedMask
    local: torch.Tensor
    start: torch.Tensor | None
    """None where it is mask * w_t, which needs no memory of its own."""


@dataclass
class _Moment:
    """A round as remembered: the global weights w_t [total] and the visits that started from them."""

    weights: torch.Tensor
    visits: list[_Visited] = field(default_factory=list)


class TheoremCurves:
    """Remembers every n-th round of a run with masks, and turns what it remembers into curves."""

    def __init__(
        self,
        every: int,
        clients: int,
        total: int,
        dtype: torch.dtype,
        start: Callable[[torch.Tensor, ClientState], torch.Tensor] | None = None,
    ) -> None:
        """
        Args:
            every: rounds between two that are remembered, each at the price in memory of the global weights and of
                the local weights of all its participants.
            clients: how many there are; `total` and `dtype` are those of the flat weights.
            start: gives the point [total] from which a client in a state trains, given w_t; None: its mask * w_t.
        """
        self._start = start
        self._every, self._clients, self._total, self._dtype = every, clients, total, dtype
        self._moments: dict[int, _Moment] = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "moments": {
                t: {
                    "weights": moment.weights,
                    "visits": [[v.client, v.mask, v.next_mask, v.local, v.start] for v in moment.visits],
                }
                for t, moment in self._moments.items()
            }
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `Misfit` for what cannot be of this run; nothing has changed then."""
        moments = Saved(state, "curves")["moments"]
        self._moments = {t.integer(): self._saved(moment) for t, moment in moments.items()}

    def _saved(self, moment: Saved) -> _Moment:
        visits = [
            _Visited(
                client.integer(high=self._clients - 1),
                mask.mask(self._total),
                next_mask.mask(self._total),
                local.tensor(self._dtype, [self._total]),
                start.tensor(self._dtype, [self._total]) if start.optional() else None,
            )
            for client, mask, next_mask, local, start in (
                visit.sequence(5) for visit in moment["visits"].sequence()
            )
        ]
        return _Moment(moment["weights"].tensor(self._dtype, [self._total]), visits)

    def remember(self, job: UpdateJob, weights: torch.Tensor, result: CompletedUpdate) -> None:
        """Take note of an update that started from the global weights w_t [total]."""
        if job.round % self._every:
            return
        moment = self._moments.setdefault(job.round, _Moment(weights.cpu()))
        state, update = at_hand(job.state), result.update
        assert update.state is not None and update.local is not None
        mask, next_mask = state.mask, update.state.mask
        assert mask is not None and next_mask is not None
        if update.mask is not None and (trained := PackedMask.pack(update.mask)) != mask:
            mask, state = trained, update.state  # found at the beginning of this very update
        start = self._start and self._start(weights, state)
        if start is not None and torch.equal(start, mask.unpack(like=weights) * weights):
            start = None
        kept = start if start is None else start.cpu()
        moment.visits.append(_Visited(job.client, mask, next_mask, update.local.cpu(), kept))

    def rows(
        self,
        engine: Engine,
        client_rows: Sequence[np.ndarray],
        final: Callable[[int], PackedMask],
        clients: Sequence[int],
    ) -> list[TheoryRow]:
        """The curves.

        Args:
            client_rows: int64, the training rows of each client.
            final: gives m*_k of client k.
            clients: over whom the mean in the objective goes: all, or a sample of very many.
        """
        end = _End(engine, client_rows, final, clients)
        return [end.row(t, moment) for t, moment in sorted(self._moments.items())]


@dataclass(frozen=True)
class _End:
    """What a run ends with, and from where it looks back."""

    engine: Engine
    client_rows: Sequence[np.ndarray]
    final: Callable[[int], PackedMask]
    clients: Sequence[int]

    def row(self, t: int, moment: _Moment) -> TheoryRow:
        """What a remembered round looks like from here."""
        weights = moment.weights.to(self.engine.device)
        visited = {visit.client for visit in moment.visits}
        references = {}
        objective = torch.zeros_like(weights)
        for client in self.clients:
            mask, gradient = self._reference(client, weights)
            objective += mask * gradient / len(self.clients)
            if client in visited:
                references[client] = mask, gradient
        ratios: list[float] = []
        for visit in moment.visits:
            if visit.client not in references:
                references[visit.client] = self._reference(visit.client, weights)
            ratios += self._ratios(visit, weights, *references[visit.client])
        steps = [distance(visit.mask, visit.next_mask) for visit in moment.visits]
        lefts = [distance(visit.mask, self.final(visit.client)) for visit in moment.visits]
        return TheoryRow(
            round=t,
            gradient_norm_sq=float(objective.square().sum()),
            mask_step=float(np.mean(steps)),
            mask_to_final=float(np.mean(lefts)),
            p=max(ratios, default=None),
        )

    def _reference(self, client: int, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """m*_k, and the gradient of F_k at m*_k * w_t."""
        mask = self.final(client).unpack(like=weights)
        return mask, self._gradient(client, mask * weights)

    def _ratios(
        self, visit: _Visited, weights: torch.Tensor, final_mask: torch.Tensor, reference: torch.Tensor
    ) -> Iterator[float]:
        """p_t of the first and the last point of a visit; at the very point of reference it says nothing."""
        mask = visit.mask.unpack(like=weights)
        start = mask * weights if visit.start is None else visit.start.to(weights)
        for point in (start, visit.local.to(weights)):
            gradient = self._gradient(visit.client, point)
            moved = (gradient - reference).square().sum()
            if moved > 0:
                yield float((mask * gradient - final_mask * reference).square().sum() / moved)

    def _gradient(self, client: int, point: torch.Tensor) -> torch.Tensor:
        return self.engine.full_gradient(point, torch.from_numpy(self.client_rows[client]))


def distance(one: PackedMask, other: PackedMask) -> float:
    """Share of the coordinates in which two masks differ."""
    return int(np.bitwise_count(one.bits.numpy() ^ other.bits.numpy()).sum()) / one.length
