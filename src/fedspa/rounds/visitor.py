"""One visit to one client, with everything that stays the same from visit to visit."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from fedspa.client_state import ClientState
from fedspa.costing.costs import NetworkCosts
from fedspa.engines.base import Engine
from fedspa.masks.base import MaskSearcher
from fedspa.methods.base import ClientTask, Method, Origin, Visit, VisitSize
from fedspa.methods.checking import check_state, checked_personal, checked_visit
from fedspa.randomness import generator, numpy_generator
from fedspa.records import Costs
from fedspa.rounds.client_states import Held, at_hand
from fedspa.rounds.clock import Clock
from fedspa.rounds.evaluation import Evaluator, PredictionBatch, Scores, score_one
from fedspa.rounds.faults import Fault, damage
from fedspa.rounds.link import Link, UpdateRefused
from fedspa.rounds.lockstep import Dialogue, relayed, run_in_lockstep
from fedspa.rounds.own_layers import OwnLayers
from fedspa.rounds.requests import Gradient, Predict, Request, Train, Trained
from fedspa.settings import FaultSettings, TrainingSettings
from fedspa.weights import ParameterSpace, all_finite

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """Which client is visited when, and what is remembered of it."""

    round: int
    """From 0."""
    client: int
    first_visit: bool
    state: Held
    """Read from the file only when the visit begins."""
    fault: Fault | None = None
    """A simulated fault that the visit meets."""


@dataclass(frozen=True)
class FineTuning:
    """A client trains a copy of the final global weights once more, at the end of the run."""

    round: int
    """Completed rounds."""
    client: int
    epochs: int
    own: Held = field(default_factory=dict)
    """The layers that it keeps to itself."""


OPTIONAL = ("holds", "local")
"""What a visit leaves beside its update that not every run has a use for."""

Job: TypeAlias = Call | FineTuning | PredictionBatch
"""What can be done by whoever has the network, the data and the global weights."""


@dataclass(frozen=True)
class Outcome:
    """A visit, the scores of its local model where the method has one, and its seconds by phase."""

    visit: Visit
    local_scores: Scores
    seconds: dict[str, float]
    clipped_from: float | None = None
    """The L2 norm that the update had before it was clipped; None where it was not."""

    @property
    def costs(self) -> Costs:
        return self.visit.costs


@dataclass(frozen=True)
class Lost:
    """A visit that leaves nothing but its costs: no update, and the client's state as it was before."""

    reason: Fault
    detail: str
    """A sentence on what happened."""
    costs: Costs
    seconds: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Visitor:
    """Visits clients. Each visit is a function of the call and the global weights alone."""

    seed: int
    training: TrainingSettings
    method: Method
    searcher: MaskSearcher | None
    engine: Engine
    network: NetworkCosts
    evaluators: Sequence[Evaluator]
    client_rows: Sequence[np.ndarray]
    """int64, the training rows of each client."""
    active: Sequence[int] = ()
    """How many parameters of each tensor the layer sparsity wants active; empty for a dense method."""
    own_layers: OwnLayers = field(default_factory=OwnLayers)
    """What clients keep to themselves of the network."""
    link: Link | None = None
    """Takes all that a visit sends through the wire format."""
    faults: FaultSettings = field(default_factory=FaultSettings)
    wanted: Collection[str] = OPTIONAL
    """Which of these vectors [total] of a visit are wanted after it; the others need not travel between processes."""

    @property
    def space(self) -> ParameterSpace:
        """Where each tensor lies in the flat weights that server and methods speak of."""
        return self.engine.space.shared

    def first_state(self, client: int, origin: Origin) -> ClientState:
        """The state of a client that was never visited; made of the same objects for all where it is the same."""
        first = check_state(self.method, self.method.first_state(client, origin))
        own = self.own_layers.first
        return first | own if own else first

    def perform(self, jobs: Sequence[Job], weights: torch.Tensor) -> list[Any]:
        """Do jobs side by side from the global weights [total]: the outcome of each visit (or what was lost of it), the
        scores of each fine-tuning, the classes of each batch to predict, in the order of the jobs."""
        batches = [job for job in jobs if isinstance(job, PredictionBatch)]
        if batches:  # jobs of one kind come together
            return self.engine.answer([self._prediction(job, weights) for job in batches])
        trainings = [job for job in jobs if not isinstance(job, PredictionBatch)]
        clocks = [Clock() for _ in trainings]
        dialogues = [self._train(job, weights, clock) for job, clock in zip(trainings, clocks, strict=True)]
        return run_in_lockstep(dialogues, self.engine, clocks)

    def work(self, job: Job) -> int:
        """How many images a job goes through in a pass; of jobs of one kind, the larger one takes longer."""
        return len(job.rows if isinstance(job, PredictionBatch) else self.client_rows[job.client])

    def _prediction(self, job: PredictionBatch, weights: torch.Tensor) -> Predict:
        """What the job asks for, of its model, which is made of the global weights [total]."""
        state, personal = at_hand(job.model.state), job.model.kind == "personal"
        model = weights
        if personal:
            model = checked_personal(
                self.method, self.method.personal(weights, state, self.searcher), weights
            )
        return self.evaluators[job.evaluator].request(
            self.own_layers.complete(model, state, personal), job.rows
        )

    def _train(self, job: Call | FineTuning, weights: torch.Tensor, clock: Clock) -> Dialogue[Any]:
        if isinstance(job, Call):
            return self._visit(job, weights, clock)
        own = at_hand(job.own)
        return self.own_layers.completed(
            self._finetune(job, weights), {name: own.tensor(name) for name in own}
        )

    def _visit(self, call: Call, weights: torch.Tensor, clock: Clock) -> Dialogue[Outcome | Lost]:
        """Visit a client from the global weights [total], and test its local model while it is at hand.

        Nothing that is not finite is left by a visit.
        """
        task = ClientTask(
            seed=self.seed,
            round=call.round,
            client=call.client,
            first_visit=call.first_visit,
            rows=torch.from_numpy(self.client_rows[call.client]),
            learning_rate=self.training.lr_at(call.round),
            weights=weights,
            state=at_hand(call.state),
            space=self.space,
            network=self.network,
            training=self.training,
            searcher=self.searcher,
            active=self.active,
            clock=clock,
        )
        made = yield from self._made(task, call.fault)
        taken = self._taken(task, made) if isinstance(made, Visit) else made
        if isinstance(taken, Lost):
            return taken
        scores: Scores = {}
        if "local" in self.method.kinds and taken.visit.local is not None:
            scores = yield from score_one(self.evaluators, taken.visit.local, [call.client])
        unwanted: dict[str, Any] = {name: None for name in OPTIONAL if name not in self.wanted}
        return replace(taken, visit=replace(taken.visit, **unwanted), local_scores=scores)

    def _made(self, task: ClientTask, fault: Fault | None) -> Dialogue[Visit | Lost]:
        """The method's visit as it arrives at the server, over the link where there is one."""
        if fault is Fault.DROPOUT:
            return _lost(task, fault, f"No answer from {_who(task)}.", self._down_costs(task))
        try:
            visit = yield from _watched(self.own_layers.visit(self._exchange(task, fault), task.state))
        except _NotFinite as error:  # such a client knows it, and sends nothing
            whole = self.method.visit_costs(self._size(task), self.searcher)
            costs = self._down_costs(task) + Costs(train_flops=whole.train_flops)
            return _lost(task, Fault.DIVERGED, f"The training of {_who(task)} diverged: its {error}.", costs)
        except UpdateRefused as error:
            detail = f"The update of {_who(task)} was refused: {error}"
            return _lost(task, Fault.CORRUPT, detail, error.costs)
        if visit.update is not None and fault in (Fault.LATE, Fault.LOST):
            what = "came after the deadline" if fault is Fault.LATE else "never arrived"
            return _lost(task, fault, f"The update of {_who(task)} {what}.", visit.costs)
        return visit

    def _taken(self, task: ClientTask, visit: Visit) -> Outcome | Lost:
        """What the server makes of a visit: it takes only finite values, and updates within the norm bound."""
        update, bound = visit.update, self.faults.norm_bound
        loss = visit.loss if visit.samples else None
        if not _finite(visit.local, update, loss, *visit.state.values()):
            detail = f"The training of {_who(task)} diverged: its update is not finite."
            return _lost(task, Fault.DIVERGED, detail, visit.costs)
        if update is not None and bound is not None:
            norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
            if norm > bound and self.faults.norm_action == "reject":
                detail = (
                    f"The update of {_who(task)} has norm {norm:.6g}, more than faults.norm_bound={bound}."
                )
                return _lost(task, Fault.NORM_BOUND, detail, visit.costs)
            if norm > bound:
                clipped = replace(visit, update=update * (bound / norm))
                return Outcome(clipped, {}, task.clock.seconds, clipped_from=norm)
        return Outcome(visit, {}, task.clock.seconds)

    def _exchange(self, task: ClientTask, fault: Fault | None) -> Dialogue[Visit]:
        """The method's visit, over the link where there is one."""
        if self.link is None:
            return checked_visit(self.method, task)
        if fault is not Fault.CORRUPT:
            return self.link.visit(self.method, task)
        source = numpy_generator(self.seed, "faults/flips", task.round, task.client)
        return self.link.visit(self.method, task, damage=lambda data: damage(data, source))

    def _size(self, task: ClientTask) -> VisitSize:
        """The size of a visit that has not been made, or has not come to its end."""
        mask = task.state.mask
        if task.first_visit and self.searcher is not None and self.searcher.searches_first:
            return task.size(task.active)  # its mask is not found yet
        return task.size(None if mask is None else task.space.count(mask.unpack(like=torch.empty(0))))

    def _down_costs(self, task: ClientTask) -> Costs:
        """What was sent to a client that sends nothing back."""
        costs = self.method.down_costs(self._size(task), self.searcher)
        encoded = self.link.down_bytes(task) if self.link and costs.down_bytes else 0
        return replace(costs, encoded_bytes=encoded)

    def _finetune(self, job: FineTuning, weights: torch.Tensor) -> Dialogue[Scores]:
        """Scores of a client's own copy of the global weights after so many epochs of its own."""
        tuned: Trained = yield Train(
            weights=weights,
            rows=torch.from_numpy(self.client_rows[job.client]),
            epochs=job.epochs,
            learning_rate=self.training.lr_at(job.round),
            generator=generator(self.seed, "finetune", job.round, job.client),
        )
        return (yield from score_one(self.evaluators, tuned.weights, [job.client]))


class _NotFinite(Exception):
    """Training diverged; says of what."""


def _lost(task: ClientTask, reason: Fault, detail: str, costs: Costs) -> Lost:
    return Lost(reason, detail, costs, task.clock.seconds)


def _who(task: ClientTask) -> str:
    return f"client {task.client} in round {task.round + 1}"


def _watched(dialogue: Dialogue[T]) -> Dialogue[T]:
    """The dialogue, but `_NotFinite` is raised as soon as an answer is not finite, which no method has to bear."""
    return relayed(dialogue, lambda request: request, _checked)


def _checked(request: Request, answer: Any) -> Any:
    if isinstance(answer, Trained):
        loss = float(answer.loss)
        if answer.samples and not (math.isfinite(loss) and _finite(answer.weights)):
            raise _NotFinite(f"weights or its loss ({loss:.6g}) are not finite")
    elif isinstance(request, Gradient) and not _finite(answer):
        raise _NotFinite("gradient is not finite")
    return answer


def _finite(*items: Any) -> bool:
    """Whether all tensors among these hold nothing but finite numbers."""
    return all(
        all_finite(item.flatten())
        for item in items
        if isinstance(item, torch.Tensor) and item.is_floating_point()
    )
