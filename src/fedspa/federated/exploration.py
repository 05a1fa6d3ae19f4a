"""The share of the parameters that were ever active in the clients' masks (R_s in Liu et al., ICML 2021, who call it
In-Time Over-Parameterization)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedspa.core.packed_mask import PackedMask

EXPLORED = "explored"
"""The name, in a client's state, of the parameters that were active in any of its masks. It is left out if these are
equal to its mask."""

EXPLORED_SHARES = ("explored_by_client", "explored_by_all")
"""The names of a round's values: the mean over the clients with an update, and that of all their masks together."""


@dataclass(frozen=True)
class Exploration:
    """The sums of a run. Running statistics, which are always active, are counted too."""

    clients: int = 0
    active: int = 0
    """The sum of the explored parameters over those clients."""
    union: PackedMask | None = None

    def noted(self, ever: PackedMask, before: PackedMask | None) -> Exploration:
        """The sums after one more update: the client's explored parameters after and, unless new, before it."""
        return Exploration(
            self.clients + (before is None),
            self.active + ever.active - (0 if before is None else before.active),
            ever if self.union is None else self.union | ever,
        )

    def shares(self, total: int, trained: int) -> dict[str, float]:
        """The values of a round by `EXPLORED_SHARES`. `total`: length of a mask; `trained`: its parameters."""
        if self.union is None:
            return dict.fromkeys(EXPLORED_SHARES, 0.0)
        counts = self.active / self.clients, self.union.active
        return {
            name: (count - (total - trained)) / trained
            for name, count in zip(EXPLORED_SHARES, counts, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        return {"clients": self.clients, "active": self.active, "union": self.union}

    @classmethod
    def loaded(cls, state: dict[str, Any]) -> Exploration:
        """The object that `state_dict` described; its mask lies in memory, not in the checkpoint's file."""
        union = state["union"]
        return cls(state["clients"], state["active"], union and union.clone())
