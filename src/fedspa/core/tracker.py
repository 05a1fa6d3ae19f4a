"""The facts about a run, before its first round and after its last, and the trackers that get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from fedspa.core.records import RoundRecord, TheoryRow

if TYPE_CHECKING:
    import numpy as np
    import torch

MEAN_OVER = {"clients": "clients", "images": "the clients\u2019 test images"}
"""The unit that a mean is taken over, by `eval.weighting`."""


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
