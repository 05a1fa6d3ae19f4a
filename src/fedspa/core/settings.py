"""The typed part of the config: the sections that every run has, their defaults and their checks.

This module does not import torch, so a mistake in a setting is reported within a second. The config groups (data set,
model, method, mask, ...) are typed by the dataclass that their YAML names as `_target_`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from fedspa.core.errors import UserError, written
from fedspa.core.limits import Limited, limited


@dataclass
class FederationSettings(Limited):
    """The clients and rounds. The paper samples 10 of 100 clients in each of 1000 rounds."""

    section: ClassVar[str] = "federation"
    clients: int = limited(100, low=1)
    clients_per_round: int = limited(10, low=1)
    rounds: int = limited(1000, low=1)
    wire: str | None = limited(None, choices=("fp32", "fp16", "bf16"))
    """Type of the values on the wire: fp32, fp16 or bf16. All weights, updates and masks then really pass
    through the wire format and its bytes are counted; null hands them over as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clients_per_round > self.clients:
            raise UserError(
                f"federation.clients_per_round={self.clients_per_round} is more than the "
                f"federation.clients={self.clients} there are: it must be at most {self.clients}."
            )


@dataclass
class TrainingSettings(Limited):
    """Local training of a client: SGD, as the paper's section 5.2 sets it, or another optimizer."""

    section: ClassVar[str] = "training"
    epochs: int = limited(5, low=1)
    batch_size: int = limited(128, low=1)
    lr: float = limited(0.1, low=0, low_open=True)
    lr_decay: float = limited(0.998, low=0, high=1, low_open=True)
    """Factor on the learning rate after each round: lr x lr_decay^t, t from 0."""
    optimizer: str = "sgd"
    """sgd, adamw, or a class of torch.optim by its path (torch.optim.RMSprop); fresh at each client update. All but sgd
    need engine=eager."""
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, such as {betas: [0.9, 0.95]}."""
    momentum: float = limited(0.0, low=0, high=1, high_open=True)
    weight_decay: float = limited(5e-4, low=0)
    proximal: float = limited(0.0, low=0)
    """mu of the proximal term that pulls weights toward those at the start of a client's update (FedProx); 0: none."""
    clip_norm: float | None = limited(10.0, low=0, low_open=True)
    """Bound on the gradient's global norm, without the weight-decay term; null: no clipping."""
    clip_scope: str = limited("all", choices=("all", "active"))
    """The norm to clip: of the whole gradient (all), or of its active coordinates (active)."""
    drop_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer not in ("sgd", "adamw") and not self.optimizer.startswith("torch.optim."):
            raise UserError(
                f"training.optimizer={self.optimizer} is not known: valid are sgd, adamw, or the path of a class, "
                "such as torch.optim.RMSprop."
            )
        if self.optimizer == "sgd" and self.optimizer_options:
            raise UserError(
                "training.optimizer_options has no effect on training.optimizer=sgd: leave it out."
            )
        if self.clip_norm is None and self.clip_scope != "all":
            raise UserError(
                f"training.clip_scope={self.clip_scope} has no effect without training.clip_norm: set it, to 10 say."
            )

    def lr_at(self, round: int) -> float:
        """The learning rate of a round, counted from 0."""
        return self.lr * self.lr_decay**round

    def samples(self, rows: int, epochs: int | None = None) -> int:
        """The samples that a client of so many rows trains on in `epochs` (default: those of a client update)."""
        kept = rows - rows % self.batch_size if self.drop_last else rows
        return kept * (self.epochs if epochs is None else epochs)


@dataclass
class EvalSettings(Limited):
    """Settings of the tests of models."""

    section: ClassVar[str] = "eval"
    every: int = limited(1, low=1)
    """Rounds between two tests of every client's global and personal model (the last round is always tested)."""
    clients: int | None = limited(None, low=1)
    """Clients whose global and personal models are tested, and finetuned. The seed draws them once for the whole run.
    null: every client. Local models are tested at each client update in any case."""
    batch_size: int = limited(500, low=1)
    final_rounds: int = limited(1, low=1)
    """The final accuracy is the mean over this many last tested rounds; never the best on test data."""
    weighting: str = limited("clients", choices=("clients", "images"))
    """The weights of a mean over clients and of its spread: every client counts alike (clients), or every test image
    does (images), so that a client with more of them counts more."""
    targets: list[float] = field(default_factory=list)
    """Accuracies in percent, or errors of a regression. The summary gives the round in which each was first reached."""

    def check_rounds(self, rounds: int) -> None:
        """Raise `UserError` if a run of so many rounds has fewer tests than `final_rounds`."""
        tested = -(-rounds // self.every)
        if self.final_rounds > tested:
            raise UserError(
                f"eval.final_rounds={self.final_rounds} is more rounds than are tested with federation.rounds={rounds} "
                f"and eval.every={self.every}: it must be at most {tested}."
            )


@dataclass
class FinetuneSettings(Limited):
    """Training after the last round: every client trains a copy of the final global model, if there is one."""

    section: ClassVar[str] = "finetune"
    epochs: int = limited(0, low=0)


@dataclass
class CostSettings(Limited):
    """Settings of the cost count: honest counts the real messages and steps; paper counts as the paper's tables do."""

    section: ClassVar[str] = "costs"
    convention: str = limited("honest", choices=("honest", "paper"))


@dataclass
class TheorySettings(Limited):
    """The curves of the paper's Theorem 1; each point costs a gradient over the data of all clients, or of the
    tested ones with `eval.clients`."""

    section: ClassVar[str] = "theory"
    every: int = limited(0, low=0)
    """Rounds between two points; 0: none. Only for methods with masks."""


@dataclass
class FaultSettings(Limited):
    """Faults of a federation: simulated ones, drawn from the seed, and the response to real ones.

    By default no fault is simulated. Only an update that is not finite is refused, and it ends the run.
    """

    section: ClassVar[str] = "faults"
    dropout: float = limited(0.0, low=0, high=1)
    """Chance that a sampled client never answers."""
    straggler_spread: float = limited(0.0, low=0, high=10)
    """The spread of the clients' speeds. An update takes (samples trained on) x exp(straggler_spread x N(0, 1))."""
    deadline: float | None = limited(None, low=0, low_open=True)
    """The time after which an update is late and left out, in multiples of the round's mean update duration."""
    loss: float = limited(0.0, low=0, high=1)
    """Chance that a client's update never arrives."""
    corruption: float = limited(0.0, low=0, high=1)
    """Chance that bits of a client's update flip on the way; needs federation.wire."""
    norm_bound: float | None = limited(None, low=0, low_open=True)
    """The largest L2 norm of an update that the server accepts unchanged."""
    norm_action: str = limited("reject", choices=("reject", "clip"))
    """The response to a larger update: reject it, or clip it (shorten it to the bound)."""
    policy: str = limited("fail", choices=("fail", "skip"))
    """The response to an update whose loss or weights are not finite: end the run (fail), or leave the client
    out of the round (skip)."""
    max_skipped: int | None = limited(None, low=0)
    """The number of updates that a run may refuse, for not being finite or for their norm. One more ends the run.
    null: any number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.straggler_spread and self.deadline is None:
            raise UserError(
                f"faults.straggler_spread={self.straggler_spread} has no effect without faults.deadline: "
                "set it to a multiple of the mean duration of a client update, such as 1.5."
            )
        if self.norm_bound is None and self.norm_action != "reject":
            raise UserError(
                f"faults.norm_action={self.norm_action} has no effect without faults.norm_bound: set it, to 5 say."
            )
        if self.max_skipped is not None and self.norm_bound is None and self.policy == "fail":
            raise UserError(
                f"faults.max_skipped={self.max_skipped} has no effect, for no update is ever skipped: set "
                "faults.policy=skip or a faults.norm_bound."
            )


@dataclass
class SaveSettings(Limited):
    """Files that a run keeps beyond its default ones."""

    section: ClassVar[str] = "save"
    local: bool = False
    """Keep the local weights of every trained client, packed."""
    personal: bool = False
    """Keep the state of every trained client. Personal models that need it can then be exported: those of Ditto and of
    mask=rigl, and all with personal_layers."""
    upload_weights: bool = False
    """Send the weights and masks to the tracking store too, not only the small files."""
    client_files: int = limited(10_000, low=0)
    """The largest number of clients that each get a row in clients.csv, a line in partition.json and a column in
    partition.png. With more clients there are arrays and no picture."""


@dataclass
class CheckpointSettings(Limited):
    """Checkpoints, from which an interrupted run resumes; see docs/reliability.md."""

    section: ClassVar[str] = "checkpoint"
    every: int | None = limited(None, low=1)
    """Rounds between two checkpoints; null: as often as writing them takes under 2 % of the time. A checkpoint is also
    written at the start, and when a run is preempted or fails."""
    keep: int = limited(2, low=0)
    """The number of newest checkpoints to keep until the run has ended well; 0: none is ever written."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every is not None and not self.keep:
            raise UserError(
                f"checkpoint.every={self.every} has no effect with checkpoint.keep=0, which writes none: set that to "
                "1 or more."
            )


@dataclass
class Config(Limited):
    """The whole config. The groups are filled by the YAML files of conf/."""

    name: str = "${method.name}-${mask.name}-s${used_sparsity:}-${dataset.name}-seed${seed}"
    seed: int = limited(0, low=0)
    sparsity: float = limited(0.5, low=0, high=1, high_open=True)
    """The share of inactive parameters, in [0, 1). Dense methods ignore it."""
    personal_layers: Any = "none"
    """Layers that stay with each client: none, head, body, norm, or a list of these words and of patterns of
    tensor names. They never travel, are not masked, and do not count for the sparsity."""
    federation: FederationSettings = field(default_factory=FederationSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    finetune: FinetuneSettings = field(default_factory=FinetuneSettings)
    costs: CostSettings = field(default_factory=CostSettings)
    faults: FaultSettings = field(default_factory=FaultSettings)
    save: SaveSettings = field(default_factory=SaveSettings)
    dry_run: bool = False
    """Print the cost of the run, and do not run it."""
    theory: TheorySettings = field(default_factory=TheorySettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    resume: str | None = None
    """The folder of an interrupted run to resume; auto: the newest one with the same settings."""
    trusted_packages: list[str] = field(default_factory=list)
    """Packages beside fedspa whose classes a config may name as `_target_`."""
    dataset: dict[str, Any] = field(default_factory=dict)
    partition: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    layer_sparsity: dict[str, Any] = field(default_factory=dict)
    mask: dict[str, Any] = field(default_factory=dict)
    server_optimizer: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    loggers: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name.strip():
            raise UserError("name is empty: leave it out, or give the run a name.")
        words, layers = ("none", "head", "body", "norm"), self.personal_layers
        patterns = isinstance(layers, list) and layers and all(isinstance(word, str) for word in layers)
        if not patterns and layers not in words:
            example = layers if isinstance(layers, str) else "fc2.*"
            raise UserError(
                f"personal_layers={written(layers)} is not known: valid are {', '.join(words)}, or a list of patterns "
                f"of tensor names, such as [{example}]."
            )
