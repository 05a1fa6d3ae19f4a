"""The records of a run: plain values that the federated loop passes to the trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch

KINDS = ("global", "personal", "local", "finetuned")
"""The models of a client that can be tested on its own test set; they differ by tens of points.

global: the server's dense weights. personal: the method's model for the client, from the server's state.
local: the client's weights right after its last local training. finetuned: a copy of the final global
weights, trained by the client once more at the end of the run.
"""

MAIN_KINDS = ("personal", "global", "local")
"""The kinds for selection. The best checkpoint and a search's best trial use the first one that the method has."""

PHASES = ("train", "search", "evaluate", "aggregate", "total")
"""The parts of a round whose wall-clock seconds are kept; total is the whole round.

Worker processes add up: their train, search and evaluate together can be more than the total.
"""

ACCURACY = "accuracy"
"""The metric that summaries and tables are about; every run has it."""

MEAN_OVER = {"clients": "clients", "images": "the clients\u2019 test images"}
"""The unit that a mean is taken over, by `eval.weighting`."""

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
    """In one word: dropout, late, lost, corrupt, diverged, too_large, clipped or empty_round."""
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
class ClientTests:
    """The numbers of examples that the clients of a run are tested on."""

    asked: int | None
    """The wanted number for each client; None if the partition gives clients their own test examples."""
    smallest: int
    median: float
    fewer: int
    """The number of clients that have fewer examples than wanted."""

    @classmethod
    def of(cls, sizes: np.ndarray, asked: int | None) -> ClientTests:
        """sizes: int64 [clients], at least one."""
        middle = sorted(sizes.tolist())[(len(sizes) - 1) // 2 : len(sizes) // 2 + 1]
        fewer = 0 if asked is None else int((sizes < asked).sum())
        return cls(asked, int(sizes.min()), sum(middle) / len(middle), fewer)

    def remark(self, clients: int) -> str:
        """A line for the user about a run of so many clients."""
        if (self.smallest, self.median) == (self.asked, self.asked):
            return f"Test examples of each client: {self.asked:,}"
        found = f"Test examples of a client: smallest number {self.smallest:,}, median {self.median:,g}"
        if not self.fewer:
            return found
        return f"{found}; {self.fewer:,} of {clients:,} clients have fewer than the {self.asked:,} asked for"


class Continued(NamedTuple):
    """The finished run that a run continues with more rounds."""

    folder: str
    round: int
    """The last round of the finished run."""
    following: list[str]
    """Settings that equal the number of rounds in both runs, such as the period of a schedule."""

    def remarks(self, rounds: int) -> list[str]:
        """Sentences for the user of a run of so many rounds."""
        remarks = [f"Continues {self.folder} after round {self.round}"]
        for setting in self.following:
            remarks.append(
                f"{setting} follows federation.rounds: it was {self.round} until round {self.round} and is {rounds} "
                f"from there on, so the weights are not those of a run of {rounds} rounds from the start; "
                f"{setting}={self.round} keeps the first schedule"
            )
        return remarks


@dataclass(frozen=True)
class RunInfo:
    """The facts about a run that are known before its first round."""

    folder: Path
    config: dict[str, Any]
    names: dict[str, str]
    sparsity: float
    seed: int
    rounds: int
    config_hash: str
    partition_hash: str
    version: str
    classes: int
    label_counts: np.ndarray | None
    """int64 [clients, classes]: the training images of each class at each client. None if there are too many clients to
    make the images of each."""
    partition_rows: Sequence[np.ndarray]
    """int64 rows of the training set of each client, with its validation rows."""
    kinds: tuple[str, ...]
    """The kinds of model that the method's rounds can test, in the order of `KINDS`."""
    metrics: tuple[str, ...]
    """The scores of each kind of model. Targets, the best checkpoint and tables use the first."""
    lower_is_better: tuple[str, ...] = ()
    """The scores that are errors."""
    in_percent: bool = True
    """True if scores are percentages, as in a classification. Scores of a regression have their own units."""
    extras: tuple[str, ...] = ()
    """Names that `RoundRecord.extras` may contain, such as prune_rate."""
    engine: str = "eager"
    """The engine that computes."""
    engine_instead_of: Mapping[str, str] = field(default_factory=dict)
    """The engines that failed before, and the reason for each."""
    compile_seconds: float = 0.0
    """Seconds spent on compiling before the first round."""
    completed: int = 0
    """Rounds done before this start; more than 0 in a run that resumes from a checkpoint."""
    continued: Continued | None = None
    """The finished run that this one continues."""
    test_rows: Sequence[np.ndarray] = ()
    """int64 rows of the test set for each client."""
    tests: ClientTests | None = None
    """The numbers of test images."""
    client_names: tuple[str, ...] = ()
    """The name of each client in the data, if the partition knows it."""
    class_names: tuple[str, ...] = ()
    """The names of the classes in the order of the labels, if the data set has names."""
    data_hash: str = ""
    """The hash of all images and labels; "" for images that are made on demand."""
    data_files: str = ""
    """A fingerprint of the files behind dataset.path. While it stays the same, so does `data_hash`."""
    remarks: tuple[str, ...] = ()
    """Sentences about the data for the user."""
    many: bool = False
    """True if there are too many clients for one line of text and one column of a picture each. Arrays replace both."""

    @property
    def clients(self) -> int:
        return len(self.partition_rows)

    @property
    def mean_over(self) -> str:
        """The unit that a mean over clients is taken over, in words."""
        return MEAN_OVER[self.config.get("eval", {}).get("weighting", "clients")]

    @property
    def engine_reason(self) -> str:
        """The reason for the choice of the engine: "compiled failed: no C compiler"; "" without a failure."""
        return "; ".join(f"{name} failed: {reason}" for name, reason in self.engine_instead_of.items())

    @property
    def images(self) -> int:
        """Training images of all clients."""
        return sum(map(len, self.partition_rows))


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


@dataclass(frozen=True)
class RunResult:
    """A finished run: the summary, the clients, and the tensors to save."""

    summary: dict[str, Any]
    clients: dict[str, np.ndarray]
    """The columns of the table of clients: an array [clients] each, NaN where a client has no such score."""
    weights: dict[str, torch.Tensor]
    """The final global weights by parameter name."""
    masks: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """uint8, bit-packed: each client's last mask over the flat weights. It may be read only on access."""
    local_weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """With `save.local`: each client's packed local weights."""
    client_states: Mapping[str, torch.Tensor] | None = None
    """With `save.personal`: the clients' stored states without their masks. They may be read only on access."""
    theory: list[TheoryRow] = field(default_factory=list)
    """With `theory.every`: the curves of Theorem 1."""


@runtime_checkable
class Tracker(Protocol):
    """Follows a run and writes its records to one place. Every call is in the run's own process and in order.

    A resumed run has new trackers. At `start` the tables of its folder have its completed rounds
    (`RunInfo.completed`). Later rounds are run again: a tracker must remove or recognise its records of them.
    """

    def start(self, info: RunInfo) -> None:
        """Called before the first round of this process."""

    def round(self, record: RoundRecord) -> None:
        """Called after each round."""

    def finish(self, result: RunResult) -> None:
        """Called when the run ended well. The files of earlier trackers are complete."""

    def abort(self, status: str, reason: str) -> None:
        """Called when the run ended early. `status` is FAILED or KILLED."""
