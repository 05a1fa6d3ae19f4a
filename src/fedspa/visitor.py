"""One visit to one client, with everything that stays the same from visit to visit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from fedspa.clock import Clock
from fedspa.costs import NetworkCosts
from fedspa.engines.base import Engine
from fedspa.errors import UserError
from fedspa.evaluation import Evaluator, Scores, score_one
from fedspa.link import Link
from fedspa.lockstep import Dialogue, converse
from fedspa.masks.base import MaskSearcher
from fedspa.methods.base import ClientState, ClientTask, Method, Visit
from fedspa.randomness import generator
from fedspa.requests import Train, Trained
from fedspa.settings import TrainingSettings
from fedspa.weights import all_finite


@dataclass(frozen=True)
class Call:
    """Which client is visited when, and what is remembered of it."""

    round: int
    """From 0."""
    client: int
    first_visit: bool
    state: ClientState


@dataclass(frozen=True)
class FineTuning:
    """A client trains a copy of the final global weights once more, at the end of the run."""

    round: int
    """Completed rounds."""
    client: int
    epochs: int


Job: TypeAlias = Call | FineTuning
"""What a client can be asked to do."""


@dataclass(frozen=True)
class Outcome:
    """A visit, the scores of its local model where the method has one, and its seconds by phase."""

    visit: Visit
    local_scores: Scores
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
    link: Link | None = None
    """Takes all that a visit sends through the wire format."""

    def perform(self, jobs: Sequence[Job], weights: torch.Tensor) -> list[Any]:
        """Do jobs side by side from the global weights [total]: the outcome of each visit, the scores of each
        fine-tuning, in the order of the jobs."""
        clocks = [Clock() for _ in jobs]
        dialogues = [self._job(job, weights, clock) for job, clock in zip(jobs, clocks, strict=True)]
        return converse(dialogues, self.engine, clocks)

    def _job(self, job: Job, weights: torch.Tensor, clock: Clock) -> Dialogue[Any]:
        return (
            self._visit(job, weights, clock) if isinstance(job, Call) else self._finetune(job, weights, clock)
        )

    def _visit(self, call: Call, weights: torch.Tensor, clock: Clock) -> Dialogue[Outcome]:
        """Visit a client from the global weights [total], and test its local model while it is at hand.

        Raises `UserError` where training diverged: nothing that is not finite reaches the server or is kept.
        """
        task = ClientTask(
            seed=self.seed,
            round=call.round,
            client=call.client,
            first_visit=call.first_visit,
            rows=torch.from_numpy(self.client_rows[call.client]),
            learning_rate=self.training.lr_at(call.round),
            weights=weights,
            state=call.state,
            space=self.engine.space,
            network=self.network,
            training=self.training,
            searcher=self.searcher,
            clock=clock,
        )
        visit = yield from self.link.visit(self.method, task) if self.link else self.method.visit(task)
        left = (visit.local, visit.update, visit.state)
        if not all(all_finite(vector) for vector in left if isinstance(vector, torch.Tensor)):
            raise UserError(
                f"The weights of client {call.client} in round {call.round + 1} are not finite (loss "
                f"{float(visit.loss)}): training diverged; lower training.lr={self.training.lr} or set "
                f"training.clip_norm (now {self.training.clip_norm})."
            )
        local_scores: Scores = {}
        if "local" in self.method.kinds:
            with clock("evaluate"):
                local_scores = score_one(self.evaluators, visit.local, [call.client])
        return Outcome(visit, local_scores, clock.seconds)

    def _finetune(self, job: FineTuning, weights: torch.Tensor, clock: Clock) -> Dialogue[Scores]:
        """Scores of a client's own copy of the global weights after so many epochs of its own."""
        tuned: Trained = yield Train(
            weights=weights,
            rows=torch.from_numpy(self.client_rows[job.client]),
            epochs=job.epochs,
            learning_rate=self.training.lr_at(job.round),
            generator=generator(self.seed, "finetune", job.round, job.client),
        )
        with clock("evaluate"):
            return score_one(self.evaluators, tuned.weights, [job.client])
