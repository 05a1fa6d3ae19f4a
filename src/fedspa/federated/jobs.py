"""The jobs of clients in a run, and the results of an update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from fedspa.core.client import ClientUpdate
from fedspa.core.client_state import ClientState
from fedspa.core.records import Costs
from fedspa.core.server import ServerState
from fedspa.federated.evaluation import PredictionBatch, Scores
from fedspa.federated.faults import Fault


@dataclass(frozen=True)
class UpdateJob:
    """A job: a client updates its model in a round."""

    round: int
    """The round, from 0."""
    client: int
    first: bool
    """True if the client has not completed any update yet."""
    state: ClientState
    fault: Fault | None = None
    """A simulated fault of this update."""
    message: ServerState | None = None
    """The message to this client; None if all clients get the same."""
    prepares: bool = False
    """True for the step before round 1."""


@dataclass(frozen=True)
class FineTuneJob:
    """A job: a client trains a copy of the final global weights at the end of the run."""

    round: int
    """The number of completed rounds."""
    client: int
    epochs: int
    own: ClientState = field(default_factory=ClientState)
    """The client's personal layers."""


Job: TypeAlias = UpdateJob | FineTuneJob | PredictionBatch
"""The work that needs the network, the data and the global weights."""


@dataclass(frozen=True)
class CompletedUpdate:
    """An update that the server accepts."""

    update: ClientUpdate
    """The client's update. Its `state` is always set."""
    loss: torch.Tensor
    """The mean loss over the trained samples: float64 scalar."""
    samples: int
    costs: Costs
    seconds: dict[str, float]
    """Wall-clock seconds by phase."""
    local_scores: Scores = field(default_factory=dict)
    """The scores of the local model, if the method has one."""
    clipped_from: float | None = None
    """The L2 norm of the update before it was clipped; None if it was not."""


@dataclass(frozen=True)
class FailedUpdate:
    """An update that failed. Only its costs count, and the client's state does not change."""

    reason: Fault
    detail: str
    """A sentence about the failure."""
    costs: Costs
    seconds: dict[str, float]


class UpdateFailed(Exception):
    """Raised if an update does not reach the server, or the server refuses it. The message says why."""

    def __init__(self, reason: Fault, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
