"""The jobs that clients do in a run, and the results of an update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from fedspa.core.client import ClientUpdate
from fedspa.core.records import Costs
from fedspa.core.server import ServerState
from fedspa.federated.client_states import Held
from fedspa.federated.evaluation import PredictionBatch, Scores
from fedspa.federated.faults import Fault


@dataclass(frozen=True)
class UpdateJob:
    """A client updates its model in a round."""

    round: int
    """From 0."""
    client: int
    first: bool
    """Whether the client has not completed any update yet."""
    state: Held
    """Read from the file only when the job begins."""
    fault: Fault | None = None
    """A simulated fault that the update meets."""
    message: ServerState | None = None
    """What this client is sent, where that differs by client."""
    prepares: bool = False
    """Whether it is the step before round 1."""


@dataclass(frozen=True)
class FineTuneJob:
    """A client trains a copy of the final global weights once more, at the end of the run."""

    round: int
    """Completed rounds."""
    client: int
    epochs: int
    own: Held = field(default_factory=dict)
    """The layers that the client keeps to itself."""


OPTIONAL = ("mask", "local")
"""The vectors of an update that not every run has a use for."""

Job: TypeAlias = UpdateJob | FineTuneJob | PredictionBatch
"""The work that needs the network, the data and the global weights."""


@dataclass(frozen=True)
class CompletedUpdate:
    """An update that the server takes."""

    update: ClientUpdate
    """`state` is always set."""
    loss: torch.Tensor
    """float64 scalar: the mean over the samples trained on."""
    samples: int
    costs: Costs
    seconds: dict[str, float]
    """By phase."""
    local_scores: Scores = field(default_factory=dict)
    """Of the local model, where the method has one."""
    clipped_from: float | None = None
    """The L2 norm that the update had before it was clipped; None where it was not."""


@dataclass(frozen=True)
class FailedUpdate:
    """An update that leaves nothing but its costs: the client's state stays as it was."""

    reason: Fault
    detail: str
    """A sentence on what happened."""
    costs: Costs
    seconds: dict[str, float]


class UpdateFailed(Exception):
    """An update does not reach the server, or the server does not take it. The message says what happened."""

    def __init__(self, reason: Fault, detail: str, costs: Costs) -> None:
        """`costs`: what the update cost all the same."""
        super().__init__(detail)
        self.reason, self.costs = reason, costs
