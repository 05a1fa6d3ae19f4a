"""Subsampling (Konecny et al., 2016): FedAvg whose clients send a random part of their update.

The mask is drawn anew for every uplink and travels as its seed; the downlink is dense.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fedspa.errors import check_range
from fedspa.masks.select import smallest
from fedspa.methods.base import ClientTask, Method, Visit, VisitSize
from fedspa.records import SEED_BYTES, Costs
from fedspa.rounds.requests import Request, Trained

if TYPE_CHECKING:
    from fedspa.masks.base import MaskSearcher


@dataclass(kw_only=True)
class Subsampling(Method):
    """Compresses the uplink; trains the dense model."""

    weighting: str = "samples"
    keep_rate: float = 0.5
    """Share of the update's coordinates that are sent."""
    rescale: bool = False
    """Whether the sent part is divided by keep_rate, which makes it unbiased; without it the server's steps
    are shorter, as the published slowdown suggests."""

    kinds: ClassVar[tuple[str, ...]] = ("global", "local")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.keep_rate", self.keep_rate, low=0, high=1, low_open=True)

    def visit(self, task: ClientTask) -> Generator[Request, Any, Visit]:
        trained: Trained = yield task.train(task.weights, task.training.epochs)
        sent = self._mask(task)
        update = sent * (task.weights - trained.weights)
        if self.rescale:
            update[: task.space.trained] /= self.keep_rate
        return Visit(
            update=update,
            holds=sent,
            local=trained.weights,
            loss=trained.loss,
            samples=trained.samples,
            costs=self.visit_costs(task.size(), None),
        )

    def _mask(self, task: ClientTask) -> torch.Tensor:
        """Exactly round(keep_rate x trained) random parameters, so that every uplink has the same length.

        Running statistics are sent whole: a part of their way would leave averages of nothing, or negative variances.
        """
        trained = task.space.trained
        kept = smallest(torch.rand(trained, generator=task.generator("uplink_mask")), self._kept(trained))
        statistics = torch.ones(task.space.total - trained, dtype=torch.bool)
        return torch.cat([kept, statistics]).to(task.weights)

    def _kept(self, parameters: int) -> int:
        return round(self.keep_rate * parameters)

    def visit_costs(self, size: VisitSize, searcher: MaskSearcher | None) -> Costs:
        network = size.network
        partial = self.keep_rate < 1 and network.convention != "paper"
        return Costs(
            train_flops=network.training_flops(None, size.training.samples(size.rows)),
            down_bytes=network.value_bytes(None),
            up_bytes=network.value_bytes([self._kept(network.parameters), network.statistics]),
            mask_bytes=SEED_BYTES if partial else 0,
        )
