"""DST: dynamic sparse training with a warm start (paper, Algorithm 3).

After its local training a client drops the active weights of smallest magnitude and grows as many
coordinates of largest gradient, tensor by tensor; the share that changes is annealed to zero. The new mask
cuts the *dense global* weights at the client's next visit, so grown coordinates do not start from zero.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fedspa.errors import check_choice, check_range
from fedspa.masks.base import MaskSearcher, SearchInput
from fedspa.masks.select import drop_and_grow

SCORES_AT_ONCE = 50_000_000
"""Of all clients that are searched at once, in a tensor; each takes some 40 bytes for a moment."""


@dataclass(kw_only=True)
class DST(MaskSearcher):
    """Prune by magnitude, regrow by gradient (RigL's criterion) or at random (SET's)."""

    alpha0: float = 0.5
    """Share of a tensor's active weights that the first search exchanges."""
    anneal_rounds: int = 1000
    """Horizon T of the annealing; the run's rounds unless set, whatever the run's own length."""
    anneal_divisor: str = "rounds_minus_one"
    """The cosine's period: T - 1 as in the paper's appendix, or T (rounds) as in related code."""
    regrow: str = "gradient"
    """Which inactive coordinates come back: those of largest gradient, or random ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("mask.alpha0", self.alpha0, low=0, high=1)
        check_range("mask.anneal_rounds", self.anneal_rounds, low=1)
        check_choice("mask.anneal_divisor", self.anneal_divisor, ("rounds_minus_one", "rounds"))
        check_choice("mask.regrow", self.regrow, ("gradient", "random"))

    @property
    def searches(self) -> bool:
        return True

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
        return self.prune_rate(round) > 0

    def describe(self, round: int) -> dict[str, float]:
        return {"prune_rate": self.prune_rate(round)}

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        """Exchange ceil(alpha_t x active) coordinates of each tensor; its active count never changes."""
        (mask,) = self.next_masks([search])
        return mask

    def next_masks(self, searches: Sequence[SearchInput]) -> list[torch.Tensor]:
        """The same for many clients of one round: those whose masks have equally many active coordinates are searched
        at once."""
        if not self.searching(searches[0].round):
            return [search.mask for search in searches]
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, search in enumerate(searches):
            alike[search.space.count(search.mask)].append(index)
        found: dict[int, torch.Tensor] = {}
        for active, indices in alike.items():
            largest = max(searches[indices[0]].space.sizes)
            at_once = max(1, SCORES_AT_ONCE // largest)
            for first in range(0, len(indices), at_once):
                some = indices[first : first + at_once]
                masks = self._exchange(active, [searches[index] for index in some])
                found.update(zip(some, masks, strict=True))
        return [found[index] for index in range(len(searches))]

    def _exchange(self, active: Sequence[int], searches: Sequence[SearchInput]) -> Iterable[torch.Tensor]:
        """The next masks [total] of clients whose tensors have `active` coordinates."""
        space, rate = searches[0].space, self.prune_rate(searches[0].round)
        pieces = (
            zip(*map(space.split, vectors), strict=True)
            for vectors in (
                [search.mask for search in searches],
                [search.weights for search in searches],
                [self._growth(search) for search in searches],
            )
        )
        exchanged = []
        for count, *of_tensor in zip(active, *pieces, strict=True):
            mask, weights, growth = map(_stacked, of_tensor)  # tensor by tensor, which needs little memory
            if count < mask.shape[1]:  # else, in a dense tensor, whatever is dropped would be grown again
                # The small slack keeps 0.3 x 10, which is 3.0000000000000004 or so in binary, at 3.
                exchange = math.ceil(rate * count - 1e-9)
                mask = drop_and_grow(mask, weights.abs(), growth.abs(), exchange)
            exchanged.append(mask)
        return torch.cat(exchanged, dim=1)

    @staticmethod
    def _growth(search: SearchInput) -> torch.Tensor:
        """What decides, by its magnitude, which coordinates come back: [total]."""
        if search.gradient is not None:
            return search.gradient
        return torch.rand(search.space.total, generator=search.generator).to(search.weights)


def _stacked(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Vectors [n] as one tensor [clients, n]; a single one is not copied."""
    return vectors[0][None] if len(vectors) == 1 else torch.stack(list(vectors))
