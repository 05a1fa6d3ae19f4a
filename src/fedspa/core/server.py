"""The server's side of a federation: its state, and the aggregate of a round's updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class ServerState:
    """The global weights, and whatever else a method keeps on the server. Replaced, never written into."""

    weights: torch.Tensor
    """The dense global weights w_t [total]."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further tensors that travel to the clients, by name, such as SCAFFOLD's control variate. Names, shapes and dtypes
    never change."""
    kept: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that stay at the server, such as a server optimizer's moments, likewise."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The weighted mean of what the clients of a round sent."""

    update: torch.Tensor | None
    """The mean of the U_k [total] (paper, Eq. 4); None where clients sent further tensors alone."""
    tensors: Mapping[str, torch.Tensor]
    """The means of the further tensors of the updates, by name."""
    trained: int
    """The number of parameters; running statistics lie behind them."""
    participation: float
    """The clients whose updates arrived, as a share of all clients of the federation."""
