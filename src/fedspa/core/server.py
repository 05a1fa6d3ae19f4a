"""The server's state, and the aggregate of a round's client updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from fedspa.core.packed_mask import PackedMask
    from fedspa.core.weights import ParameterSpace


@dataclass(frozen=True, eq=False)
class ServerState:
    """The global weights and a method's further tensors on the server. A state is never changed in place."""

    weights: torch.Tensor
    """The dense global weights w_t [total]."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further tensors that travel to the clients, by name, such as SCAFFOLD's control variate. Names, shapes and dtypes
    never change. One name has a meaning: `mask`, the bits of a mask that all clients share (`PackedMask.bits`). The
    weights then travel under it, and its bits to a client that has another one."""
    kept: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that stay at the server, such as a server optimizer's moments. Names, shapes and dtypes never change."""

    neighbours: int | None = None
    """The number of other clients that the weights come from; each sends its values and its mask. None: the weights
    come from the server."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    @property
    def mask(self) -> PackedMask | None:
        """The mask that all clients share; None if there is none."""
        # Imported here, because these modules load torch, and the check of a config must not.
        from fedspa.core.client_state import MASK
        from fedspa.core.packed_mask import PackedMask

        return PackedMask(self.tensors[MASK], len(self.weights)) if MASK in self.tensors else None

    @property
    def further(self) -> dict[str, torch.Tensor]:
        """The tensors that travel as values."""
        from fedspa.core.client_state import MASK

        return {name: tensor for name, tensor in self.tensors.items() if name != MASK}


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The weighted mean of a round's client updates."""

    update: torch.Tensor | None
    """The mean of the U_k [total] (paper, Eq. 4); None if the clients sent further tensors alone."""
    tensors: Mapping[str, torch.Tensor]
    """The means of the updates' further tensors, by name."""
    space: ParameterSpace
    """The place of each tensor in a flat vector [total]."""
    participation: float
    """The clients whose updates arrived, as a share of all clients of the federation."""
    held: torch.Tensor | None = None
    """bool [total]: the coordinates that some update has. None if all updates are dense, or if the method's
    normaliser is participants."""
