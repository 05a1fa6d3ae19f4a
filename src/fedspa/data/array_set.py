"""Examples in memory that need no decoding: features, or tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class ArraySet:
    """Inputs and targets of N examples, on the CPU."""

    inputs: torch.Tensor
    """Features float32 [N, F], or tokens int64 [N, L]."""
    targets: torch.Tensor
    """Classes int64 [N], or numbers float32 [N, K]."""
    groups: np.ndarray | None = None
    """As in `ImageSet`."""

    def __len__(self) -> int:
        return len(self.targets)
