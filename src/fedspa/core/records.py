"""What a run says of itself: plain values that the federated loop hands to the trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from fedspa.core.saved import Saved

if TYPE_CHECKING:
    import numpy as np
    import torch

KINDS = ("global", "personal", "local", "finetuned")
"""The models of a client that can be tested on its own test set; they differ by tens of points.

global: the server's dense weights. personal: what the method gives the client from the server's state.
local: the client's weights right after its last local training. finetuned: a copy of the final global
weights, trained by the client once more at the end of the run.
"""

MAIN_KINDS = ("personal", "global", "local")
"""What selects, the best checkpoint or a search's best trial, looks at the first of these kinds that the method has."""

PHASES = ("train", "search", "evaluate", "aggregate", "total")
"""The parts of a round whose wall-clock seconds are kept; total is the whole round.

Worker processes add up: their train, search and evaluate together can be more than the total.
"""

ACCURACY = "accuracy"
"""The metric that summaries and tables are about; every run has it."""

MEAN_OVER = {"clients": "clients", "images": "the clients\u2019 test images"}
"""What a mean over clients is over, by `eval.weighting`."""

VALIDATION = "val_"
"""How the names of scores on validation rows begin: the only ones that may select anything."""

SEED_BYTES = 8
"""A random mask travels as the seed that draws it."""


@dataclass(frozen=True)
class Costs:
    """What training costs: FLOPs and bytes on the wire, in exact integers. Costs add up.

    FLOPs are None where the network has a layer that cannot be counted, and then so is every sum over them.
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
    """How a score is spread over the clients that have it."""

    mean: float
    std: float
    p10: float
    worst_decile: float
    min: float
    max: float
    clients: int


def saved_costs(saved: Saved) -> Costs:
    """The costs in a checkpoint, there as `asdict` gives them. Raises `Misfit`."""
    saved.mapping(f.name for f in fields(Costs))
    counts: dict[str, Any] = {}
    for f in fields(Costs):
        known = saved[f.name].optional() if f.name.endswith("_flops") else saved[f.name]
        counts[f.name] = known and known.integer()
    return Costs(**counts)


def saved_spread(saved: Saved) -> Spread:
    """A spread in a checkpoint, there as `asdict` gives it. Raises `Misfit`."""
    saved.mapping(f.name for f in fields(Spread))
    statistics = {f.name: saved[f.name].number() for f in fields(Spread) if f.name != "clients"}
    return Spread(**statistics, clients=saved["clients"].integer(1))


@dataclass(frozen=True)
class Event:
    """Something in a round that did not go as it should, and what was done about it."""

    round: int
    """From 1, as in `RoundRecord`."""
    client: int | None
    """None where the whole round is meant."""
    kind: str
    """In one word: dropout, late, lost, corrupt, diverged, too_large, clipped or empty_round."""
    action: str
    detail: str
    """A sentence on what happened."""


@dataclass(frozen=True)
class RoundRecord:
    """One round. `round` counts completed rounds from 1; `scores[kind][metric]` is empty between evaluations."""

    round: int
    participants: tuple[int, ...]
    """The clients that were sampled, also those whose visit left nothing."""
    learning_rate: float
    loss: float | None
    """Mean over the samples; None where no visit counted."""
    samples: int
    """Trained on, in the visits that counted."""
    costs: Costs
    total_costs: Costs
    dense_costs: Costs
    scores: dict[str, dict[str, Spread]]
    extras: dict[str, float]
    """What only this method or mask has to tell, by the names in `RunInfo.extras`."""
    seconds: dict[str, float]
    """Wall-clock seconds by the names in `PHASES`; a phase that did not happen may be left out."""
    events: tuple[Event, ...] = ()
    """What did not go as it should, in client order."""
    total_events: dict[str, int] = field(default_factory=dict)
    """How many events of each kind there were in the run so far."""


@dataclass(frozen=True)
class ClientTests:
    """How many images the clients of a run are tested on."""

    asked: int | None
    """Of each client; None where the partition gives clients test images of their own."""
    smallest: int
    median: float
    fewer: int
    """So many clients have fewer than what was asked for."""

    @classmethod
    def of(cls, sizes: np.ndarray, asked: int | None) -> ClientTests:
        """sizes: int64 [clients], at least one."""
        middle = sorted(sizes.tolist())[(len(sizes) - 1) // 2 : len(sizes) // 2 + 1]
        fewer = 0 if asked is None else int((sizes < asked).sum())
        return cls(asked, int(sizes.min()), sum(middle) / len(middle), fewer)

    def told(self, clients: int) -> str:
        """A line on a run of so many clients."""
        if (self.smallest, self.median) == (self.asked, self.asked):
            return f"Test images of each client: {self.asked:,}"
        asked = "" if self.asked is None else f"{self.asked:,} asked for, "
        fewer = f"; {self.fewer:,} of {clients:,} clients have fewer" if self.fewer else ""
        return f"Test images of a client: {asked}{self.smallest:,} at least, {self.median:,g} in the median{fewer}"


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run before its first round."""

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
    """int64 [clients, classes]: the training images of each class that each client holds; None where that is not
    known of so many clients without making their images."""
    partition_rows: Sequence[np.ndarray]
    """int64 rows of the training set that each client holds, its validation rows included."""
    kinds: tuple[str, ...]
    """The kinds of model that the method's rounds can test, in the order of `KINDS`."""
    metrics: tuple[str, ...]
    """The scores of each kind; accuracy is one of them."""
    extras: tuple[str, ...] = ()
    """Names that `RoundRecord.extras` may hold, such as prune_rate."""
    engine: str = "eager"
    """What computes, once chosen."""
    engine_instead_of: Mapping[str, str] = field(default_factory=dict)
    """What was to compute before, and why each could not."""
    compile_seconds: float = 0.0
    """Spent before the first round on compiling."""
    completed: int = 0
    """Rounds done before this start; more than 0 in a run that goes on from a checkpoint."""
    test_rows: Sequence[np.ndarray] = ()
    """int64 rows of the test set that each client is tested on."""
    tests: ClientTests | None = None
    """How many images that are."""
    client_names: tuple[str, ...] = ()
    """What each client stands for in the data, where the partition knows it."""
    class_names: tuple[str, ...] = ()
    """In the order of the labels, where the data set has names for them."""
    data_hash: str = ""
    """Of all images and labels; "" of images that are made on demand."""
    data_files: str = ""
    """What the file system says of the files behind dataset.path: while that is the same, so is `data_hash`."""
    remarks: tuple[str, ...] = ()
    """What a user should be told of the data, a sentence each."""
    many: bool = False
    """Whether there are too many clients for a line of text and a picture's column each: arrays take their place."""

    @property
    def clients(self) -> int:
        return len(self.partition_rows)

    @property
    def mean_over(self) -> str:
        """What a mean over clients is over, in words."""
        return MEAN_OVER[self.config.get("eval", {}).get("weighting", "clients")]

    @property
    def engine_reason(self) -> str:
        """Why the run computes with no other engine: "compiled failed: no C compiler"; mostly empty."""
        return "; ".join(f"{name} failed: {reason}" for name, reason in self.engine_instead_of.items())

    @property
    def images(self) -> int:
        """Training images of all clients."""
        return sum(map(len, self.partition_rows))


@dataclass(frozen=True)
class ClientRow:
    """One client at the end of a run. A score that it does not have is None."""

    client: int
    train_size: int
    val_size: int
    test_size: int
    visits: int
    density: float
    scores: dict[str, float | None]
    """In percent by kind of model and metric, as global_accuracy."""


@dataclass(frozen=True)
class TheoryRow:
    """The quantities of the paper's Theorem 1 in one round."""

    round: int
    """t, from 0: the weights are those that the round starts from."""
    gradient_norm_sq: float
    """Squared norm of the gradient of the SPFL objective (paper, P2) at w_t, under the final masks."""
    mask_step: float
    """Share of the coordinates in which a visited client's mask and its next one differ, mean over the visited."""
    mask_to_final: float
    """The same between its mask and its final one."""
    p: float | None
    """p_t, its maximum taken over the first and last points of each visit's local training (so from below);
    None where the gradients never differ."""


@dataclass(frozen=True)
class RunResult:
    """A finished run: the summary, the clients, and the tensors worth keeping."""

    summary: dict[str, Any]
    clients: list[ClientRow]
    weights: dict[str, torch.Tensor]
    """The final global weights by parameter name."""
    client_arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """Of very many clients (`RunInfo.many`), instead of `clients`: what their rows would say, [clients] each."""
    masks: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """uint8, bit-packed: a client's last mask over the flat weights, perhaps read when it is asked for."""
    local_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """With `save.local`: a client's packed local weights."""
    client_states: Mapping[str, torch.Tensor] | None = None
    """With `save.personal`: what clients remember beside their masks, perhaps read when it is asked for."""
    theory: list[TheoryRow] = field(default_factory=list)
    """With `theory.every`: the curves of Theorem 1."""


@runtime_checkable
class Tracker(Protocol):
    """Follows a run and writes it somewhere. Every call is in the run's own process and order.

    A run that was broken off goes on with new trackers: what `state_dict` gave after the round that the run goes
    on from is handed to `load_state_dict`, then `start` follows. What a tracker wrote of later rounds it must
    take back or recognise, for these rounds are made again.
    """

    def state_dict(self) -> dict[str, Any]:
        """What it has to remember across a break: plain values in dicts and lists, asked for after each round."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what another one of its kind remembered; {} where there was none."""

    def start(self, info: RunInfo) -> None:
        """Before the first round of this process."""

    def round(self, record: RoundRecord) -> None:
        """After each round."""

    def finish(self, result: RunResult) -> None:
        """The run ended well; everything in its folder that trackers before this one write is there."""

    def abort(self, status: str, reason: str) -> None:
        """The run ended early: status is FAILED or KILLED."""
