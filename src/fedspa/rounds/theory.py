"""The quantities of the paper's Theorem 1, measured along a run.

The theorem bounds the squared norm of the gradient of the SPFL objective f (paper, P2), whose personal masks
m*_k are taken to be those that the run ends with. So some rounds are remembered while the run goes on, and
looked at when its masks are final. Gradients are over all of a client's training rows, without augmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedspa.engines.base import Engine
from fedspa.masks.packed import PackedMask
from fedspa.methods.base import Visit
from fedspa.records import TheoryRow
from fedspa.rounds.visitor import Call


@dataclass(frozen=True)
class _Visited:
    """A visit as remembered: its client, the mask before and after, and the weights it ended with."""

    client: int
    mask: PackedMask
    next_mask: PackedMask
    local: torch.Tensor


@dataclass
class _Moment:
    """A round as remembered: the global weights w_t [total] and the visits that started from them."""

    weights: torch.Tensor
    visits: list[_Visited] = field(default_factory=list)


class TheoremCurves:
    """Remembers every n-th round of a run with masks, and turns what it remembers into curves."""

    def __init__(self, every: int) -> None:
        """`every`: rounds between two that are remembered, each at the price in memory of the global weights and of the
        local weights of all its participants."""
        self._every = every
        self._moments: dict[int, _Moment] = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "moments": {
                t: {
                    "weights": moment.weights,
                    "visits": [[v.client, v.mask, v.next_mask, v.local] for v in moment.visits],
                }
                for t, moment in self._moments.items()
            }
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._moments = {
            t: _Moment(moment["weights"], [_Visited(*visited) for visited in moment["visits"]])
            for t, moment in state["moments"].items()
        }

    def remember(self, call: Call, weights: torch.Tensor, visit: Visit) -> None:
        """Take note of a visit that started from the global weights w_t [total]."""
        if call.round % self._every:
            return
        moment = self._moments.setdefault(call.round, _Moment(weights.cpu()))
        mask, next_mask = call.state.mask, visit.state.mask
        assert mask is not None and next_mask is not None
        moment.visits.append(_Visited(call.client, mask, next_mask, visit.local.cpu()))

    def rows(
        self, engine: Engine, client_rows: Sequence[np.ndarray], final: Sequence[PackedMask]
    ) -> list[TheoryRow]:
        """The curves; `final[k]` is m*_k, `client_rows[k]` int64 the client's training rows."""
        rows = [torch.from_numpy(own) for own in client_rows]
        return [self._row(t, moment, engine, rows, final) for t, moment in sorted(self._moments.items())]

    def _row(
        self,
        t: int,
        moment: _Moment,
        engine: Engine,
        rows: Sequence[torch.Tensor],
        final: Sequence[PackedMask],
    ) -> TheoryRow:
        weights = moment.weights.to(engine.device)
        at_final = {}  # the gradient of F_k at m*_k * w_t, for the clients visited
        objective = torch.zeros_like(weights)
        for client, own in enumerate(rows):
            mask = final[client].unpack(like=weights)
            gradient = engine.full_gradient(mask * weights, own)
            objective += mask * gradient / len(rows)
            if any(client == visited.client for visited in moment.visits):
                at_final[client] = mask, gradient
        ratios = []
        for visited in moment.visits:
            mask = visited.mask.unpack(like=weights)
            for point in (mask * weights, visited.local.to(weights)):
                gradient = engine.full_gradient(point, rows[visited.client])
                final_mask, reference = at_final[visited.client]
                moved = (gradient - reference).square().sum()
                if moved > 0:  # at the very point of reference the ratio says nothing
                    ratios.append(float((mask * gradient - final_mask * reference).square().sum() / moved))
        return TheoryRow(
            round=t,
            gradient_norm_sq=float(objective.square().sum()),
            mask_step=float(np.mean([distance(v.mask, v.next_mask) for v in moment.visits])),
            mask_to_final=float(np.mean([distance(v.mask, final[v.client]) for v in moment.visits])),
            p=max(ratios, default=None),
        )


def distance(one: PackedMask, other: PackedMask) -> float:
    """Share of the coordinates in which two masks differ."""
    return int(np.bitwise_count(one.bits.numpy() ^ other.bits.numpy()).sum()) / one.length
