"""Ditto (Li et al., 2021): a shared model trained as in FedAvg, and a personal one pulled towards it.

Of a visit's epochs some go to the shared branch, which starts from w_t and is merged, and the others to
the client's own v_k: after each of its SGD steps v <- v - lr * proximal * (v - w_t). Clients that are not
visited keep a stale v_k.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedspa.client_state import ClientState
from fedspa.errors import UserError, check_range
from fedspa.methods.base import ClientTask, Method, Origin, Visit, VisitSize
from fedspa.records import Costs
from fedspa.rounds.requests import Pull, Request, Trained
from fedspa.settings import TrainingSettings

if TYPE_CHECKING:
    import torch

    from fedspa.masks.base import MaskSearcher


@dataclass(kw_only=True)
class Ditto(Method):
    """Its personal model is v_k; its local one the shared branch after the client's epochs."""

    weighting: str = "samples"
    normaliser: ClassVar[str] = "participants"  # type: ignore[misc]  # all hold every coordinate: not a setting
    shared_epochs: int = 2
    """Epochs on the shared branch; with the personal ones they make up the training.epochs of a visit."""
    personal_epochs: int = 3
    proximal: float = 0.5
    """lambda: strength of the pull towards the round's starting weights."""

    kinds: ClassVar[tuple[str, ...]] = ("global", "personal", "local")
    personal_is_own: ClassVar[bool] = True
    trains_personal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.shared_epochs", self.shared_epochs, low=0)
        check_range("method.personal_epochs", self.personal_epochs, low=0)
        check_range("method.proximal", self.proximal, low=0)
        if self.shared_epochs + self.personal_epochs == 0:
            raise UserError(
                "method.shared_epochs and method.personal_epochs are both 0: one must be at least 1."
            )

    def check_training(self, training: TrainingSettings) -> None:
        epochs = self.shared_epochs + self.personal_epochs
        if training.epochs != epochs:
            raise UserError(
                f"training.epochs={training.epochs} is not what method.shared_epochs={self.shared_epochs} and "
                f"method.personal_epochs={self.personal_epochs} add up to: it must be {epochs}, or they must change."
            )

    def first_state(self, client: int, origin: Origin) -> ClientState:
        return ClientState(weights=origin.weights)

    def visit(self, task: ClientTask) -> Generator[Request, Any, Visit]:
        import torch

        shared_batches = task.generator("shared_batches")
        shared: Trained = yield task.train(task.weights, self.shared_epochs, source=shared_batches)
        pull = Pull(task.weights, self.proximal)
        personal: Trained = yield task.train(task.own_weights, self.personal_epochs, pull=pull, personal=True)
        branches = [branch for branch in (shared, personal) if branch.samples]
        samples = sum(branch.samples for branch in branches)
        return Visit(
            update=task.weights - shared.weights,
            state=ClientState(weights=personal.weights),
            local=shared.weights,
            loss=torch.stack([branch.loss * branch.samples for branch in branches]).sum() / samples,
            samples=samples,
            costs=self.visit_costs(task.size(), None),
        )

    def visit_costs(self, size: VisitSize, searcher: MaskSearcher | None) -> Costs:
        network = size.network
        samples = size.training.samples(size.rows, self.shared_epochs + self.personal_epochs)
        return Costs(
            train_flops=network.training_flops(None, samples),
            down_bytes=network.value_bytes(None),
            up_bytes=network.value_bytes(None),
        )

    def personal(
        self, weights: torch.Tensor, state: ClientState, searcher: MaskSearcher | None
    ) -> torch.Tensor:
        """v_k, whatever the server's weights have become."""
        return state.tensor("weights")
