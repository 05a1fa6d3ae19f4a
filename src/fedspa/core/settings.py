"""The typed part of the config: the sections that every run has, their defaults and their checks.

Light on purpose (no torch): a mistake in here is answered within a second. The config groups (data set,
model, method, mask, ...) are typed by the dataclass that their YAML names as `_target_`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedspa.core.errors import UserError, check_choice, check_range, written


@dataclass
class FederationSettings:
    """Who takes part: the paper samples 10 of 100 clients in each of 1000 rounds."""

    clients: int = 100
    clients_per_round: int = 10
    rounds: int = 1000
    wire: str | None = None
    """Type of the values on the wire: fp32, fp16 or bf16. All weights, updates and masks then really pass
    through the wire format and its bytes are counted; null hands them over as they are."""

    def __post_init__(self) -> None:
        check_range("federation.clients", self.clients, low=1)
        check_range("federation.rounds", self.rounds, low=1)
        check_range("federation.clients_per_round", self.clients_per_round, low=1)
        if self.clients_per_round > self.clients:
            raise UserError(
                f"federation.clients_per_round={self.clients_per_round} is more than the "
                f"federation.clients={self.clients} there are: it must be at most {self.clients}."
            )
        if self.wire is not None:
            check_choice("federation.wire", self.wire, ("fp32", "fp16", "bf16"))


@dataclass
class TrainingSettings:
    """Local training of a client: SGD, as the paper's section 5.2 sets it, or another optimizer."""

    epochs: int = 5
    batch_size: int = 128
    lr: float = 0.1
    lr_decay: float = 0.998
    """Factor on the learning rate after each round: lr x lr_decay^t, t from 0."""
    optimizer: str = "sgd"
    """sgd, adamw, or a class of torch.optim by its path (torch.optim.RMSprop); fresh at each client update. All but sgd
    need engine=eager."""
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, such as {betas: [0.9, 0.95]}."""
    momentum: float = 0.0
    weight_decay: float = 5e-4
    proximal: float = 0.0
    """mu of a proximal term that holds a client near the weights that it starts from (FedProx); 0: none."""
    clip_norm: float | None = 10.0
    """Bound on the gradient's global norm, without the weight-decay term; null: no clipping."""
    clip_scope: str = "all"
    """Whose norm is clipped: that of the whole gradient (all) or of its active coordinates (active)."""
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_range("training.epochs", self.epochs, low=1)
        check_range("training.batch_size", self.batch_size, low=1)
        check_range("training.lr", self.lr, low=0, low_open=True)
        check_range("training.lr_decay", self.lr_decay, low=0, high=1, low_open=True)
        if self.optimizer not in ("sgd", "adamw") and not self.optimizer.startswith("torch.optim."):
            raise UserError(
                f"training.optimizer={self.optimizer} is not known: valid are sgd, adamw, or the path of a class, "
                "such as torch.optim.RMSprop."
            )
        if self.optimizer == "sgd" and self.optimizer_options:
            raise UserError(
                "training.optimizer_options has no effect on training.optimizer=sgd: leave it out."
            )
        check_range("training.momentum", self.momentum, low=0, high=1, high_open=True)
        check_range("training.weight_decay", self.weight_decay, low=0)
        check_range("training.proximal", self.proximal, low=0)
        if self.clip_norm is not None:
            check_range("training.clip_norm", self.clip_norm, low=0, low_open=True)
        check_choice("training.clip_scope", self.clip_scope, ("all", "active"))
        if self.clip_norm is None and self.clip_scope != "all":
            raise UserError(
                f"training.clip_scope={self.clip_scope} has no effect without training.clip_norm: set it, to 10 say."
            )

    def lr_at(self, round: int) -> float:
        """The learning rate of a round, counted from 0."""
        return self.lr * self.lr_decay**round

    def samples(self, rows: int, epochs: int | None = None) -> int:
        """Samples that a client of so many rows trains on in `epochs` (default: all of a visit's)."""
        kept = rows - rows % self.batch_size if self.drop_last else rows
        return kept * (self.epochs if epochs is None else epochs)


@dataclass
class EvalSettings:
    """When and how the models are tested."""

    every: int = 1
    """Rounds between two tests of every client's global and personal model (the last round is always tested)."""
    clients: int | None = None
    """Clients whose global and personal models are tested, and finetuned: so many, drawn from the seed once and for
    all; null: every client. Local models are tested at each visit in any case."""
    batch_size: int = 500
    final_rounds: int = 1
    """The final accuracy is the mean over this many last tested rounds; never the best on test data."""
    weighting: str = "clients"
    """What counts alike in a mean over clients, and in its spread: every client (clients), or every image that they are
    tested on (images), so that a client with more of them counts more."""
    targets: list[float] = field(default_factory=list)
    """Accuracies in percent: the summary says in which round each was first reached."""

    def __post_init__(self) -> None:
        check_range("eval.every", self.every, low=1)
        if self.clients is not None:
            check_range("eval.clients", self.clients, low=1)
        check_range("eval.batch_size", self.batch_size, low=1)
        check_range("eval.final_rounds", self.final_rounds, low=1)
        check_choice("eval.weighting", self.weighting, ("clients", "images"))
        for target in self.targets:
            check_range("eval.targets", target, low=0, high=100)

    def check_rounds(self, rounds: int) -> None:
        """Raise `UserError` where a run of so many rounds tests fewer than the final accuracy is to be the mean of."""
        tested = -(-rounds // self.every)
        if self.final_rounds > tested:
            raise UserError(
                f"eval.final_rounds={self.final_rounds} is more rounds than are tested with federation.rounds={rounds} "
                f"and eval.every={self.every}: it must be at most {tested}."
            )


@dataclass
class FinetuneSettings:
    """After the last round: every client trains a copy of the final global model, where there is one."""

    epochs: int = 0

    def __post_init__(self) -> None:
        check_range("finetune.epochs", self.epochs, low=0)


@dataclass
class CostSettings:
    """honest counts what really happens and travels; paper counts as the paper's tables do."""

    convention: str = "honest"

    def __post_init__(self) -> None:
        check_choice("costs.convention", self.convention, ("honest", "paper"))


@dataclass
class TheorySettings:
    """The curves of the paper's Theorem 1; each point costs a gradient over the data of all clients, or of the
    tested ones with `eval.clients`."""

    every: int = 0
    """Rounds between two points; 0: none. Only for methods with masks."""

    def __post_init__(self) -> None:
        check_range("theory.every", self.every, low=0)


@dataclass
class FaultSettings:
    """Faults of a federation: simulated ones, drawn from the seed, and what is done about real ones.

    By default no fault is simulated and no update is refused but one that is not finite, which ends the run.
    """

    dropout: float = 0.0
    """Chance that a sampled client never answers."""
    straggler_spread: float = 0.0
    """How unequally fast clients are: a visit takes (samples trained on) x exp(straggler_spread x N(0, 1))."""
    deadline: float | None = None
    """Updates that come later are not waited for: in multiples of the mean duration of the round's visits."""
    loss: float = 0.0
    """Chance that a client's update never arrives."""
    corruption: float = 0.0
    """Chance that bits of a client's update flip on the way; needs federation.wire."""
    norm_bound: float | None = None
    """Largest L2 norm of an update that the server takes as it is."""
    norm_action: str = "reject"
    """What it does with a larger one: reject it, or clip it (shorten it to the bound)."""
    policy: str = "fail"
    """What a client does to the run whose loss or weights are no longer finite: end it (fail), or be left out of the
    round (skip)."""
    max_skipped: int | None = None
    """How many updates may be refused in a whole run, for not being finite or for their norm; one more ends the run.
    null: any number."""

    def __post_init__(self) -> None:
        check_range("faults.dropout", self.dropout, low=0, high=1)
        check_range("faults.straggler_spread", self.straggler_spread, low=0, high=10)
        if self.deadline is not None:
            check_range("faults.deadline", self.deadline, low=0, low_open=True)
        elif self.straggler_spread:
            raise UserError(
                f"faults.straggler_spread={self.straggler_spread} has no effect without faults.deadline: "
                "set it to a multiple of the mean duration of a visit, such as 1.5."
            )
        check_range("faults.loss", self.loss, low=0, high=1)
        check_range("faults.corruption", self.corruption, low=0, high=1)
        if self.norm_bound is not None:
            check_range("faults.norm_bound", self.norm_bound, low=0, low_open=True)
        check_choice("faults.norm_action", self.norm_action, ("reject", "clip"))
        check_choice("faults.policy", self.policy, ("fail", "skip"))
        if self.norm_bound is None and self.norm_action != "reject":
            raise UserError(
                f"faults.norm_action={self.norm_action} has no effect without faults.norm_bound: set it, to 5 say."
            )
        if self.max_skipped is not None:
            check_range("faults.max_skipped", self.max_skipped, low=0)
            if self.norm_bound is None and self.policy == "fail":
                raise UserError(
                    f"faults.max_skipped={self.max_skipped} has no effect, for no update is ever skipped: set "
                    "faults.policy=skip or a faults.norm_bound."
                )


@dataclass
class SaveSettings:
    """What a run keeps beyond its default files."""

    local: bool = False
    """Keep the local weights of every visited client, packed."""
    personal: bool = False
    """Keep what every visited client remembers beside its mask, so that models can be exported that are made of it:
    the personal ones of Ditto and of mask=rigl, and all with personal_layers."""
    upload_weights: bool = False
    """Send the weights and masks to the tracking store too, not only the small files."""
    client_files: int = 10_000
    """Up to so many clients each has a row in clients.csv, a line in partition.json and a column in partition.png;
    of more there are arrays, and no picture."""

    def __post_init__(self) -> None:
        check_range("save.client_files", self.client_files, low=0)


@dataclass
class CheckpointSettings:
    """What a run that is broken off goes on from; see docs/reliability.md."""

    every: int | None = None
    """Rounds between two checkpoints; null: as often as writing them takes under 2 % of the time. One is written at
    the start too, and where a run is preempted or fails."""
    keep: int = 2
    """How many of the newest stay until the run has ended well; 0: none is ever written."""

    def __post_init__(self) -> None:
        if self.every is not None:
            check_range("checkpoint.every", self.every, low=1)
        check_range("checkpoint.keep", self.keep, low=0)
        if self.every is not None and not self.keep:
            raise UserError(
                f"checkpoint.every={self.every} has no effect with checkpoint.keep=0, which writes none: set that to "
                "1 or more."
            )


@dataclass
class Config:
    """The whole config. The groups are filled by the YAML files of conf/."""

    name: str = "${dataset.name}-${method.name}-${mask.name}-s${used_sparsity:}-seed${seed}"
    seed: int = 0
    sparsity: float = 0.5
    """Share of the parameters that are inactive, in [0, 1); ignored by dense methods."""
    personal_layers: Any = "none"
    """Layers that every client keeps to itself: none, head, body, norm, or a list of these words and of patterns of
    tensor names. They never travel, are not masked, and count for no sparsity."""
    federation: FederationSettings = field(default_factory=FederationSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    finetune: FinetuneSettings = field(default_factory=FinetuneSettings)
    costs: CostSettings = field(default_factory=CostSettings)
    faults: FaultSettings = field(default_factory=FaultSettings)
    save: SaveSettings = field(default_factory=SaveSettings)
    dry_run: bool = False
    """Say what the run would cost, and run nothing."""
    theory: TheorySettings = field(default_factory=TheorySettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    resume: str | None = None
    """Go on with a run that was broken off: that in this folder, or with auto the newest of the same settings."""
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
        check_range("sparsity", self.sparsity, low=0, high=1, high_open=True)
        check_range("seed", self.seed, low=0)
        _check_personal_layers(self.personal_layers)


def _check_personal_layers(setting: Any) -> None:
    words = ("none", "head", "body", "norm")
    if isinstance(setting, str):
        if setting not in words:
            raise UserError(
                f"personal_layers={setting} is not known: valid are {', '.join(words)}, or a list of patterns of "
                f"tensor names, such as [{setting}]."
            )
    elif not isinstance(setting, list) or not setting or not all(isinstance(word, str) for word in setting):
        raise UserError(
            f"personal_layers={written(setting)} is not known: valid are {', '.join(words)}, or a list of patterns of "
            "tensor names, such as [fc2.*]."
        )
