"""Channel masks: DST on whole channels, so that a client trains a physically small network.

After its local training a client drops the channels that matter least and grows as many others, group by group of
layers that must agree; the share that changes is annealed to zero. Every client has the same numbers of channels, so
all small networks have the same shapes. As in DST, a grown channel starts from the server's dense values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedspa.core.channels import Channels
from fedspa.core.errors import UserError
from fedspa.core.limits import limited
from fedspa.core.randomness import uniform
from fedspa.masks.dst import DST
from fedspa.masks.search_input import SearchInput
from fedspa.masks.select import by_piece, drop_and_grow, whole

if TYPE_CHECKING:
    from fedspa.core.client import Client
    from fedspa.core.weights import ParameterSpace


class Widths:
    """The numbers of units of each group of channels; `fit` sets them."""

    groups: Sequence[int] = ()
    widths: Sequence[int] = ()
    """The active ones."""


@dataclass(kw_only=True)
class ChannelDST(Widths, DST):
    """Drops and grows units of channels (see `Channels`), each with all of its weights, biases, scales and shifts."""

    drop: str = limited("norm", choices=("norm", "taylor"))
    """The score of an active unit; the smallest are dropped. norm: the L2 norm of its weights. taylor:
    |sum of gradient x weight| (Molchanov et al., 2019)."""
    regrow: str = limited("rolling", choices=("gradient", "random", "rolling"))
    """The inactive units to regrow: in turn, from a place that moves on by one each round (rolling; FedRolex, Alam et
    al., 2022), random ones, or those of largest gradient. The gradient of an absent channel is 0. So for it clients
    receive the dense weights, and compute one batch with the dense network."""

    cuts_channels = True
    keeps_tensors = False  # of the layer sparsity only the total is used

    def fit(self, space: ParameterSpace, target: Sequence[int], horizon: int) -> None:
        """Choose the numbers of units. Raises `UserError` if even one unit in each group exceeds the budget."""
        assert space.channels is not None
        self.groups, self.widths = space.channels.groups, widths(space.channels, space, sum(target))
        super().fit(space, space.channels.counts(space.tensors, self.widths), horizon)

    @property
    def needs_gradient(self) -> bool:
        return self.regrow == "gradient" or self.drop == "taylor"

    @property
    def first_counts(self) -> Sequence[int]:
        return self.widths

    def exchanging(self, round: int) -> bool:
        """True also before `fit`, when no widths are known."""
        return self.searching(round) and (not self.widths or any(self._exchanged(round)))

    def receives_dense(self, round: int) -> bool:
        return self.regrow == "gradient" and self.exchanging(round)

    def gradient_weights(self, client: Client, trained: torch.Tensor) -> torch.Tensor:
        """The trained weights; with `regrow=gradient` the server's fill up the absent channels."""
        if not self.receives_dense(client.round):
            return trained
        return torch.where(client.mask > 0, trained, client.weights)

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        """Exchange floor(alpha_t x active) units of each group; their number never changes."""
        if not self.exchanging(search.round):
            return search.mask
        space, channels = search.space, search.space.channels
        assert channels is not None
        units = space.mask_bits(search.mask)
        vectors = (units, self._dropping(search, channels), self._growing(search, channels))
        return space.mask_of(by_piece(drop_and_grow, channels.split, vectors, self._exchanged(search.round)))

    def _exchanged(self, round: int) -> list[int]:
        """The units of each group that a search exchanges; none in a group that is whole."""
        rate, pairs = self.prune_rate(round), zip(self.widths, self.groups, strict=True)
        return [whole(rate * active) if active < size else 0 for active, size in pairs]

    def _dropping(self, search: SearchInput, channels: Channels) -> torch.Tensor:
        """The score of each unit [units]; the smallest active ones are dropped."""
        if self.drop == "norm":
            return channels.sums(search.space.tensors, search.weights.square())
        assert search.gradient is not None
        return channels.sums(search.space.tensors, search.gradient * search.weights).abs()

    def _growing(self, search: SearchInput, channels: Channels) -> torch.Tensor:
        """The score of each unit [units]; the largest inactive ones grow."""
        if self.regrow == "gradient":
            assert search.gradient is not None
            return channels.sums(search.space.tensors, search.gradient.square())
        if self.regrow == "random":
            return uniform(channels.total, search.generator, search.weights)
        ranks = [(search.round - torch.arange(size)) % size for size in channels.groups]
        return torch.cat(ranks).to(search.weights)


def widths(channels: Channels, space: ParameterSpace, budget: int) -> tuple[int, ...]:
    """The number of active units of each group: as many as leave at most `budget` parameters active.

    All groups get the largest common share that fits. The rest of the budget goes to the last groups, whose weights are
    used at the fewest positions.

    Raises `UserError` if even one unit in each group is too much.
    """

    def at(share: tuple[int, int]) -> tuple[int, ...]:
        return tuple(max(1, size * share[0] // share[1]) for size in channels.groups)

    def parameters(chosen: Sequence[int]) -> int:
        return sum(channels.counts(space.tensors, chosen))

    every = {(k, n) for n in channels.groups for k in range(1, n + 1)}
    shares = sorted(every, key=lambda share: share[0] / share[1])
    fitting = bisect_right(shares, budget, key=lambda share: parameters(at(share)))
    if not fitting:
        least, total = parameters(at((0, 1))), space.total
        raise UserError(
            f"mask=channels leaves {least:,} of the {total:,} parameters active at least (one channel of each layer, "
            f"and what cannot be cut), but sparsity leaves {budget:,}: use "
            f"sparsity={int(1000 * (1 - least / total)) / 1000:g} at most."
        )
    chosen = list(at(shares[fitting - 1]))
    for group in reversed(range(len(chosen))):
        while chosen[group] <= channels.groups[group] and parameters(chosen) <= budget:
            chosen[group] += 1
        chosen[group] -= 1
    return tuple(chosen)
