"""Sub-FedAvg (Vahidian et al., 2021), unstructured: clients start dense and prune their own sub-network.

After the first and after the last local epoch the client marks the smallest `prune_rate` of the active
weights of each tensor of two or more dimensions. It adopts the second of these masks if the two still
differ (its sub-network has not settled), if it is denser than the target, and if the pruned model is still
good. The original judges that on test data; here it is the client's own training data.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fedspa.client_state import ClientState
from fedspa.errors import UserError, check_range
from fedspa.masks.packed import PackedMask
from fedspa.masks.select import smallest
from fedspa.methods.base import ClientTask, Method, Origin, Visit, VisitSize
from fedspa.records import Costs
from fedspa.rounds.requests import Request, Trained, TrainingAccuracy
from fedspa.settings import TrainingSettings

if TYPE_CHECKING:
    from fedspa.masks.base import MaskSearcher
    from fedspa.weights import ParameterSpace


@dataclass(kw_only=True)
class SubFedAvg(Method):
    """Each coordinate is averaged over the clients whose just adopted mask holds it."""

    weighting: str = "uniform"
    normaliser: str = "holders"
    sparsity: float = 0.5
    """Where pruning ends: a client at or above it prunes no more. Tensors of one dimension do not count."""
    prune_rate: float = 0.05
    """Share of a tensor's active weights that one adoption prunes."""
    distance_threshold: float = 1e-4
    """Least mean Hamming distance between the two candidate masks."""
    accuracy_threshold: float = 0.5
    """Least accuracy, in [0, 1], of the pruned model on the client's training data."""

    kinds: ClassVar[tuple[str, ...]] = ("global", "personal", "local")
    uses_sparsity: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.sparsity", self.sparsity, low=0, high=1, high_open=True)
        check_range("method.prune_rate", self.prune_rate, low=0, high=1)
        check_range("method.distance_threshold", self.distance_threshold, low=0)
        check_range("method.accuracy_threshold", self.accuracy_threshold, low=0, high=1)

    def check_training(self, training: TrainingSettings) -> None:
        if training.epochs < 2:
            raise UserError(
                f"training.epochs={training.epochs} leaves method={self.name} nothing to compare: it prunes where "
                "the masks after the first and the last epoch differ, so it must be at least 2."
            )

    def first_state(self, client: int, origin: Origin) -> ClientState:
        return ClientState(mask=origin.full_mask)

    def visit(self, task: ClientTask) -> Generator[Request, Any, Visit]:
        space, mask = task.space, task.own_mask.unpack(like=task.weights)
        start = mask * task.weights
        source = task.generator("batches")
        first: Trained = yield task.train(start, 1, mask=mask, source=source)
        last = first
        if task.training.epochs > 1:
            last = yield task.train(first.weights, task.training.epochs - 1, mask=mask, source=source)
        samples = first.samples + (last.samples if last is not first else 0)

        with task.clock("search"):
            early, late = self._pruned(space, mask, first.weights), self._pruned(space, mask, last.weights)
            unsettled = float((early != late).float().mean()) > self.distance_threshold
            judged = unsettled and self._pruned_share(space, mask) < self.sparsity
        adopted = False
        if judged:
            accuracy: float = yield TrainingAccuracy(weights=late * last.weights, rows=task.rows)
            adopted = accuracy > self.accuracy_threshold
        next_mask = late if adopted else mask
        active, sent = space.count(mask), space.count(next_mask)
        size = task.size(active)
        return Visit(
            update=next_mask * (start - last.weights),
            holds=next_mask,
            state=ClientState(mask=PackedMask.pack(next_mask)) if adopted else task.state,
            local=last.weights,
            loss=(first.loss * first.samples + (last.loss * last.samples if last is not first else 0.0))
            / samples,
            samples=samples,
            costs=self.visit_costs(size, None)
            + Costs(
                search_flops=size.network.forward_flops(space.count(late)) * size.rows if judged else 0,
                up_bytes=size.network.value_bytes(sent) - size.network.value_bytes(active),
                mask_bytes=size.network.mask_bytes(sent) if adopted else 0,
            ),
        )

    def _pruned(self, space: ParameterSpace, mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The mask [total] without the smallest active weights of each tensor of two or more dimensions."""
        pieces = []
        vectors = space.split(mask), space.split(weights)
        for shape, held, active, weight in zip(space.shapes, space.count(mask), *vectors, strict=True):
            if len(shape) > 1:
                # The small slack keeps 0.29 x 100, which is 28.999999999999996 in binary, at 29.
                count = math.floor(self.prune_rate * held + 1e-9)
                dropped = smallest(weight.abs().masked_fill(active == 0, torch.inf), count)
                active = active.masked_fill(dropped, 0)
            pieces.append(active)
        return torch.cat(pieces)

    @staticmethod
    def _pruned_share(space: ParameterSpace, mask: torch.Tensor) -> float:
        """Inactive share of the tensors of two or more dimensions."""
        counted = [
            (size - held, size)
            for shape, size, held in zip(space.shapes, space.sizes, space.count(mask), strict=True)
            if len(shape) > 1
        ]
        return sum(pruned for pruned, _ in counted) / sum(size for _, size in counted)

    def visit_costs(self, size: VisitSize, searcher: MaskSearcher | None) -> Costs:
        """A visit that prunes nothing; what pruning saves and costs is only known after it."""
        network = size.network
        return Costs(
            train_flops=network.training_flops(size.active, size.training.samples(size.rows)),
            down_bytes=network.value_bytes(size.active),
            up_bytes=network.value_bytes(size.active),
        )

    def personal(
        self, weights: torch.Tensor, state: ClientState, searcher: MaskSearcher | None
    ) -> torch.Tensor:
        """m_{k,t+1} * w_{t+1}."""
        assert state.mask is not None
        return state.mask.unpack(like=weights) * weights
