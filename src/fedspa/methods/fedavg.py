"""FedAvg (McMahan et al., 2017): every client trains the whole dense model; the dense rival of FedSpa."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from fedspa.masks.base import MaskSearcher
from fedspa.methods.base import ClientTask, Method, Visit, VisitSize
from fedspa.records import Costs
from fedspa.rounds.requests import Request, Trained


@dataclass(kw_only=True)
class FedAvg(Method):
    """Its local model, the global weights after a client's own epochs, is the fair rival of FedSpa's."""

    weighting: str = "samples"
    normaliser: ClassVar[str] = "participants"  # type: ignore[misc]  # all hold every coordinate: not a setting

    kinds: ClassVar[tuple[str, ...]] = ("global", "local")

    def visit(self, task: ClientTask) -> Generator[Request, Any, Visit]:
        trained: Trained = yield task.train(task.weights, task.training.epochs)
        return Visit(
            update=task.weights - trained.weights,
            local=trained.weights,
            loss=trained.loss,
            samples=trained.samples,
            costs=self.visit_costs(task.size(), None),
        )

    def visit_costs(self, size: VisitSize, searcher: MaskSearcher | None) -> Costs:
        network = size.network
        return Costs(
            train_flops=network.training_flops(None, size.training.samples(size.rows)),
            down_bytes=network.value_bytes(None),
            up_bytes=network.value_bytes(None),
        )
