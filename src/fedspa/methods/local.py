"""Local: every client trains a model of its own from the same start; nothing is ever sent."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedspa.client_state import ClientState
from fedspa.methods.base import ClientTask, Method, Origin, Visit, VisitSize
from fedspa.records import Costs
from fedspa.rounds.requests import Request, Trained

if TYPE_CHECKING:
    from fedspa.masks.base import MaskSearcher


@dataclass(kw_only=True)
class Local(Method):
    """The sampled clients train on; there is no server's model and no traffic."""

    weighting: ClassVar[str] = "uniform"  # type: ignore[misc]  # nothing is merged: not a setting
    normaliser: ClassVar[str] = "participants"  # type: ignore[misc]
    kinds: ClassVar[tuple[str, ...]] = ("local",)
    sends: ClassVar[bool] = False

    def first_state(self, client: int, origin: Origin) -> ClientState:
        return ClientState(weights=origin.weights)

    def visit(self, task: ClientTask) -> Generator[Request, Any, Visit]:
        trained: Trained = yield task.train(task.own_weights, task.training.epochs)
        return Visit(
            update=None,
            state=ClientState(weights=trained.weights),
            local=trained.weights,
            loss=trained.loss,
            samples=trained.samples,
            costs=self.visit_costs(task.size(), None),
        )

    def visit_costs(self, size: VisitSize, searcher: MaskSearcher | None) -> Costs:
        return Costs(train_flops=size.network.training_flops(None, size.training.samples(size.rows)))
