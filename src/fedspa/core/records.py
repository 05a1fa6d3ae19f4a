"""The records of rounds: plain values that the federated loop passes to the trackers."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

KINDS = ("global", "personal", "local", "finetuned")
"""The models of a client that can be tested on its own test set; they differ by tens of points.

global: the server's dense weights, with the client's own personal layers if it has any. personal: the method's model
for the client, from the server's state. local: the client's weights right after its last local training. finetuned: a
copy of the final global weights, trained by the client once more at the end of the run.
"""

MAIN_KINDS = ("personal", "global", "local")
"""The kinds for selection. The best checkpoint and a search's best trial use the first one that the method has."""

PHASES = ("train", "search", "evaluate", "aggregate", "total")
"""The parts of a round whose wall-clock seconds are kept; total is the whole round.

Worker processes add up: their train, search and evaluate together can be more than the total.
"""

ACCURACY = "accuracy"
"""The metric that summaries and tables are about; every run has it."""

VALIDATION = "val_"
"""The prefix of scores on validation rows. Only such scores may select a model or a setting."""

SEED_BYTES = 8
"""A random mask travels as the seed that draws it."""


@dataclass(frozen=True)
class Costs:
    """The costs of training: FLOPs and bytes on the wire, in exact integers. Costs can be added.

    FLOPs are None if the network has a layer that cannot be counted. Every sum with None is None.
    """

    train_flops: int | None = 0
    search_flops: int | None = 0
    down_bytes: int = 0
    up_bytes: int = 0
    mask_bytes: int = 0
    encoded_bytes: int = 0
    """Measured size of all messages in the wire format; 0 in a run that does not use it (federation.wire)."""

    @property
    def flops(self) -> int | None:
        return plus(self.train_flops, self.search_flops)

    @property
    def traffic_bytes(self) -> int:
        return self.down_bytes + self.up_bytes + self.mask_bytes

    def __add__(self, other: Costs) -> Costs:
        sums: list[Any] = [plus(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return Costs(*sums)

    def __mul__(self, factor: int) -> Costs:
        products: list[Any] = [times(getattr(self, f.name), factor) for f in fields(self)]
        return Costs(*products)


def plus(one: int | None, other: int | None) -> int | None:
    """The sum of two numbers; None where one of them is not known."""
    return None if one is None or other is None else one + other


def times(number: int | None, factor: int) -> int | None:
    """The product; None where the number is not known."""
    return None if number is None else number * factor


@dataclass(frozen=True)
class Spread:
    """The statistics of a score over the clients that have it."""

    mean: float
    std: float
    p10: float
    worst_decile: float
    min: float
    max: float
    clients: int


@dataclass(frozen=True)
class Event:
    """A fault in a round, and the action taken."""

    round: int
    """From 1, as in `RoundRecord`."""
    client: int | None
    """None for an event of the whole round."""
    kind: str
    """In one word: dropout, late, lost, corrupt, diverged, norm_bound or empty_round."""
    action: str
    """The action taken, in words."""
    detail: str
    """A sentence about the event."""


@dataclass(frozen=True)
class RoundRecord:
    """One round. `round` counts completed rounds from 1; `scores[kind][metric]` is empty in a round without tests."""

    round: int
    participants: tuple[int, ...]
    """The sampled clients, also those whose client update was lost or refused."""
    learning_rate: float
    loss: float | None
    """Mean over the samples; None where no client update counted."""
    samples: int
    """The samples of the client updates that counted."""
    costs: Costs
    total_costs: Costs
    dense_costs: Costs
    scores: dict[str, dict[str, Spread]]
    extras: dict[str, float]
    """Values that only this method or mask reports, by the names in `RunInfo.extras`."""
    seconds: dict[str, float]
    """Wall-clock seconds by the names in `PHASES`. Phases that did not happen may be missing."""
    events: tuple[Event, ...] = ()
    """The faults of the round, in client order."""
    total_events: dict[str, int] = field(default_factory=dict)
    """The number of events of each kind in the run so far."""


@dataclass(frozen=True)
class TheoryRow:
    """The quantities of the paper's Theorem 1 in one round."""

    round: int
    """t, from 0: the weights are those that the round starts from."""
    gradient_norm_sq: float
    """Squared norm of the gradient of the SPFL objective (paper, P2) at w_t, under the final masks."""
    mask_step: float
    """Share of the coordinates in which a mask and the client's next one differ, mean over the trained clients."""
    mask_to_final: float
    """The mean share of coordinates in which a client's mask and its final mask differ."""
    p: float | None
    """p_t, its maximum taken over the first and last points of each client update (so from below);
    None where the gradients never differ."""
