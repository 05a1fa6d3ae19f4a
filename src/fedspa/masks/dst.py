"""DST: dynamic sparse training with a warm start (paper, Algorithm 3).

After its local training a client drops the active weights of smallest magnitude and grows as many
coordinates of largest gradient, tensor by tensor; the share that changes is annealed to zero. The new mask
cuts the *dense global* weights at the client's next update, so grown coordinates do not start from zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedspa.core.limits import limited
from fedspa.masks.dynamic import DynamicSearcher
from fedspa.masks.search_input import SearchInput, random_scores
from fedspa.masks.select import by_piece, drop_and_grow


@dataclass(kw_only=True)
class DST(DynamicSearcher):
    """Prunes by magnitude, and regrows by gradient (as RigL does) or at random (as SET does)."""

    alpha0: float = limited(0.5, low=0, high=1)
    """The share of a tensor's active weights that the first search exchanges."""
    anneal_rounds: int = limited(1000, low=1)
    """The horizon T of the annealing. By default it is the run's number of rounds."""
    anneal_divisor: str = limited("rounds_minus_one", choices=("rounds_minus_one", "rounds"))
    """The cosine's period: T - 1 as in the paper's appendix, or T (rounds) as in related code."""
    regrow: str = limited("gradient", choices=("gradient", "random"))
    """The inactive coordinates to regrow: those of largest gradient, or random ones."""

    @property
    def needs_gradient(self) -> bool:
        return self.regrow == "gradient"

    def prune_rate(self, round: int) -> float:
        """alpha_t = alpha_0 / 2 (1 + cos(pi t / (T - 1))), t from 0 (paper, appendix); 0 past the horizon."""
        period = self.anneal_rounds - (self.anneal_divisor == "rounds_minus_one")
        if period == 0:
            return self.alpha0
        return 0.5 * self.alpha0 * (1 + math.cos(math.pi * min(round / period, 1.0)))

    def searching(self, round: int) -> bool:
        """False where the prune rate is 0: in the last round of the horizon (with the paper's divisor) and after it."""
        return super().searching(round) and self.prune_rate(round) > 0

    def describe(self, round: int) -> dict[str, float]:
        return {"prune_rate": self.prune_rate(round)}

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        """Exchange ceil(alpha_t x active) coordinates of each tensor; its active count never changes."""
        if not self.searching(search.round):
            return search.mask
        growth = random_scores(search) if search.gradient is None else search.gradient.abs()
        rate, pairs = self.prune_rate(search.round), zip(search.counts, search.space.sizes, strict=True)
        # In a dense tensor every dropped coordinate would grow again. The small slack keeps 0.3 x 10, which is
        # 3.0000000000000004 or so in binary, at 3.
        exchanged = [math.ceil(rate * count - 1e-9) if count < size else 0 for count, size in pairs]
        vectors = (search.mask, search.weights.abs(), growth)
        return by_piece(drop_and_grow, search.space.split, vectors, exchanged)
