"""What an engine is: it holds the working network and answers the requests of visits on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from fedspa.rounds.requests import Answer, Request
from fedspa.weights import ParameterSpace


class Engine(Protocol):
    """Computes on one network that serves every client. Its answers depend on the requests alone."""

    @property
    def name(self) -> str:
        """As in the config."""

    instead_of: dict[str, str]
    """What was to compute before this engine was taken, and why each of them could not; mostly empty."""

    @property
    def compile_seconds(self) -> float:
        """What was spent on compiling and capturing before the first round."""

    @property
    def space(self) -> ParameterSpace:
        """Where each parameter tensor lies in the flat weights."""

    @property
    def device(self) -> torch.device:
        """Where the network lies."""

    @property
    def weights(self) -> torch.Tensor:
        """A copy of the working network's flat weights [total]."""

    @property
    def clients_at_once(self) -> int | None:
        """How many visits gain from advancing in lockstep; None: as many as there are."""

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """The answers to requests of one kind, in their order."""

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Dense gradient [total] of the mean loss over all `rows` (int64 [n]), without augmentation."""
