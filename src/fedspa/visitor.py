"""One visit to one client, with everything that stays the same from visit to visit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from fedspa.clock import Clock
from fedspa.costs import NetworkCosts
from fedspa.engine import EagerEngine
from fedspa.errors import UserError
from fedspa.evaluation import Evaluator, Scores, score_one
from fedspa.link import Link
from fedspa.masks.base import MaskSearcher
from fedspa.methods.base import ClientState, ClientTask, Method, Visit
from fedspa.randomness import generator
from fedspa.settings import TrainingSettings


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
    engine: EagerEngine
    network: NetworkCosts
    evaluators: Sequence[Evaluator]
    client_rows: Sequence[np.ndarray]
    """int64, the training rows of each client."""
    link: Link | None = None
    """Takes all that a visit sends through the wire format."""

    def perform(self, job: Job, weights: torch.Tensor) -> Outcome | Scores:
        """Do a job from the global weights [total]: an outcome of a visit, the scores of a fine-tuning."""
        return self.visit(job, weights) if isinstance(job, Call) else self.finetune(job, weights)

    def visit(self, call: Call, weights: torch.Tensor) -> Outcome:
        """Visit a client from the global weights [total], and test its local model while it is at hand.

        Raises `UserError` where training diverged: nothing that is not finite reaches the server or is kept.
        """
        clock = Clock()
        task = ClientTask(
            seed=self.seed,
            round=call.round,
            client=call.client,
            first_visit=call.first_visit,
            rows=torch.from_numpy(self.client_rows[call.client]),
            learning_rate=self.training.lr_at(call.round),
            weights=weights,
            state=call.state,
            engine=self.engine,
            network=self.network,
            training=self.training,
            searcher=self.searcher,
            clock=clock,
        )
        visit = self.link.visit(self.method, task) if self.link else self.method.visit(task)
        left = (visit.local, visit.update, visit.state)
        if not all(torch.isfinite(vector).all() for vector in left if isinstance(vector, torch.Tensor)):
            raise UserError(
                f"The weights of client {call.client} in round {call.round + 1} are not finite (loss "
                f"{visit.loss}): training diverged; lower training.lr={self.training.lr} or set "
                f"training.clip_norm (now {self.training.clip_norm})."
            )
        local_scores: Scores = {}
        if "local" in self.method.kinds:
            with clock("evaluate"):
                local_scores = score_one(self.evaluators, visit.local, [call.client])
        return Outcome(visit, local_scores, clock.seconds)

    def finetune(self, job: FineTuning, weights: torch.Tensor) -> Scores:
        """Scores of a client's own copy of the global weights after so many epochs of its own."""
        tuned = self.engine.train(
            weights,
            torch.from_numpy(self.client_rows[job.client]),
            epochs=job.epochs,
            learning_rate=self.training.lr_at(job.round),
            generator=generator(self.seed, "finetune", job.round, job.client),
        )
        return score_one(self.evaluators, tuned.weights, [job.client])
