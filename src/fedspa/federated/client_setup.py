"""The parts of the clients' computation that are the same for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fedspa.core.settings import TrainingSettings
from fedspa.core.weights import ParameterSpace
from fedspa.costs.network import NetworkCosts
from fedspa.federated.own_layers import OwnLayers
from fedspa.training.base import Engine


@dataclass(frozen=True, kw_only=True)
class ClientSetup:
    """The engine, the data and the settings of all clients."""

    seed: int
    training: TrainingSettings
    engine: Engine
    network: NetworkCosts
    client_rows: Sequence[np.ndarray]
    """int64 rows: the training rows of each client."""
    initial: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """The initial global weights w_0 [shared]."""
    public: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [n] on the CPU: the public training rows, in order."""
    own_layers: OwnLayers = field(default_factory=OwnLayers)
    """The personal layers of the network, which stay with the clients."""

    @property
    def space(self) -> ParameterSpace:
        """The place of each tensor in the flat weights that server and methods share."""
        return self.engine.space.shared
