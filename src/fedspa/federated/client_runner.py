"""The client's side of a round: receive the weights, let the method update the client, send the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from fedspa.communication.link import Link
from fedspa.core.client import ClientUpdate, Diverged, Mixture
from fedspa.core.client_state import ClientState
from fedspa.core.packed_mask import PackedMask
from fedspa.core.read_only import read_only
from fedspa.core.server import ServerState
from fedspa.core.settings import FaultSettings
from fedspa.core.transfers import Reads
from fedspa.core.weights import finite
from fedspa.costs.charges import computed_costs
from fedspa.federated.client import LocalClient
from fedspa.federated.client_setup import ClientSetup
from fedspa.federated.client_states import Room
from fedspa.federated.evaluation import Evaluator, PredictionBatch, Scores, predict_all, scored
from fedspa.federated.faults import Fault
from fedspa.federated.jobs import (
    CompletedUpdate,
    FailedUpdate,
    FineTuneJob,
    Job,
    UpdateFailed,
    UpdateJob,
)
from fedspa.federated.messages import to_client, to_server
from fedspa.methods.base import Method
from fedspa.methods.checking import check_state, check_update, checked_personal, title

RESIDENT_BYTES = 2**30
"""The largest size of the masks of clients that stay on a GPU. A hundred clients with VGG11 take 115 MB."""
Steps: TypeAlias = Iterator[Any]
"""A job yields its result last. It may yield None before: its work is queued, and other jobs queue theirs then."""


@dataclass(frozen=True, kw_only=True)
class ClientRunner:
    """Runs the jobs of clients. Each result depends on the job and the global weights alone."""

    setup: ClientSetup
    method: Method
    evaluators: Sequence[Evaluator]
    link: Link | None = None
    """Encodes all messages in the wire format; None passes them on unchanged."""
    faults: FaultSettings = field(default_factory=FaultSettings)
    unused: Sequence[str] = ()
    """The vectors of an update that the run does not use: mask or local. They do not travel between processes."""
    room: Room = field(default_factory=lambda: Room(RESIDENT_BYTES))
    """On the device, for masks that it made."""

    def first_state(self, client: int) -> ClientState:
        """The state of a new client. Clients with equal states share the same objects."""
        initial = self.setup.initial
        with read_only(title(self.method), {"initial.weights": initial.weights}):
            state = self.method.client_init(client, initial)
        state = check_state(self.method, state, initial.weights)
        layers = self.setup.own_layers.first
        return state | layers if layers else state

    def perform(self, job: Job, server: ServerState) -> Any:
        """Run one job from the server's state.

        Returns:
            A `CompletedUpdate` or a `FailedUpdate` for an `UpdateJob`, the scores of the tuned model for a
            `FineTuneJob`, the predictions [n, ...] for a `PredictionBatch`.
        """
        return next(self.perform_all([job], server))

    def perform_all(self, jobs: Sequence[Job], server: ServerState) -> Iterator[Any]:
        """Queue the work of all jobs, in the engine's lanes, and then finish them in their order.

        The first job to finish waits for the device, and reads the values of all jobs. All results then are in memory.
        """
        reads = Reads()
        steps = [self._steps(job, server, reads) for job in jobs]
        begun = self.setup.engine.in_lanes([partial(next, each) for each in steps])
        for each, result in zip(steps, begun, strict=True):
            yield next(each) if result is None else result

    def _steps(self, job: Job, server: ServerState, reads: Reads) -> Steps:
        match job:
            case UpdateJob():
                return self._update(job, server, reads)
            case FineTuneJob():
                return self._finetune(job, server.weights, reads)
            case PredictionBatch():
                return self._predict(job, server.weights)

    def work(self, job: Job) -> int:
        """The number of examples in one pass of a job. Of two jobs of one kind, the larger one takes longer."""
        return len(job.rows if isinstance(job, PredictionBatch) else self.setup.client_rows[job.client])

    def _update(self, job: UpdateJob, server: ServerState, reads: Reads) -> Steps:
        sent = server if job.message is None else job.message
        client = self._client(job.round, job.client, job.first, sent.weights, job.state, reads)
        try:
            yield from self._completed(job, client, sent, reads)
        except UpdateFailed as error:
            yield FailedUpdate(error.reason, str(error), client.costs, client.clock.seconds)
        except Diverged as error:  # the client notices it, and sends nothing
            detail = f"The training of {client.title} diverged: its {error}."
            costs = replace(client.costs, search_flops=0)
            yield FailedUpdate(Fault.DIVERGED, detail, costs, client.clock.seconds)

    def _completed(self, job: UpdateJob, client: LocalClient, server: ServerState, reads: Reads) -> Steps:
        """The client's side of a round. Raises `UpdateFailed` or `Diverged`."""
        method, setup = self.method, self.setup

        # 1. Receive the server's state.
        if method.sends:
            dense = method.receives_dense(client.round)
            server = to_client(client, server, self.link, dense, method.sends_weights)
            client.weights = server.weights
        known = client.state.mask
        if job.fault is Fault.DROPOUT:
            raise UpdateFailed(job.fault, f"No answer from {client.title}.")

        # 2. Let the method update the client.
        given = {f"client.{name}": getattr(client, name) for name in ("weights", "initial", "state")}
        with read_only(client.method, {**given, "server": server.tensors}):
            if job.prepares:
                update = method.client_prepare(client, server)
            else:
                if client.first:
                    client.state = check_state(method, method.client_start(client, server), server.weights)
                update = method.client_update(client, server)
        check_update(method, update, server.weights, job.prepares)
        update = client.with_own_layers(update)

        # 3. Queue all that must be known of the update, and let other clients queue their work.
        if update.mask is not None:
            client.count_later(update.mask)
        loss, at_rest = reads.add([client.loss]), _with_masks_read(update, reads, self.room)
        facts, predicted = reads.add(self._facts(update)), reads.add(self._predicted(client, update))
        yield
        with client.timed("train"):
            client.settle()
        client.costs = computed_costs(
            setup.network, client.costs, setup.training.batch_size, method.uses_mask
        )

        # 4. Send the update. The server checks it.
        update = at_rest()
        arrived = to_server(client, update, self.link, known, job.fault)
        known_facts = facts() if arrived is update else self._facts(arrived)  # the wire may have rounded it
        arrived, clipped_from = self._accepted(client, arrived, known_facts)

        # 5. Test the local model.
        scores: Scores = {}
        if predicted():
            with client.timed("evaluate"):
                scores = scored(self.evaluators, predicted(), [client.id])
        unused: dict[str, Any] = dict.fromkeys(self.unused)
        yield CompletedUpdate(
            replace(arrived, **unused),
            loss()[0],
            client.samples,
            client.costs,
            client.clock.seconds,
            scores,
            clipped_from,
        )

    def _facts(self, update: ClientUpdate) -> list[torch.Tensor]:
        """Two values: a bool scalar, true if the update is finite; and its norm in float64, 0 if no bound is set."""
        assert update.state is not None
        items = (update.local, update.update, *update.tensors.values(), *update.state.values())
        flags = [
            finite(item.flatten())
            for item in items
            if isinstance(item, torch.Tensor) and item.is_floating_point() and item.numel()
        ]
        norm = torch.zeros((), dtype=torch.float64)
        if update.update is not None and self.faults.norm_bound is not None:
            norm = torch.linalg.vector_norm(update.update, dtype=torch.float64)
        return [torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool), norm]

    def _predicted(self, client: LocalClient, update: ClientUpdate) -> list[torch.Tensor]:
        """The local model's predictions for the client's test examples; empty if the method has no local model."""
        if "local" not in self.method.kinds or update.local is None:
            return []
        with client.timed("evaluate"):
            return predict_all(self.evaluators, self.setup.engine, update.local, [client.id])

    def _accepted(
        self, client: LocalClient, update: ClientUpdate, facts: Sequence[torch.Tensor]
    ) -> tuple[ClientUpdate, float | None]:
        """The update, and its norm before it was clipped; None if it was not clipped.

        Raises `UpdateFailed` unless the update is finite and within the norm bound.
        """
        is_finite, norm, bound = bool(facts[0]), float(facts[1]), self.faults.norm_bound
        if not is_finite:
            detail = f"The training of {client.title} diverged: its update is not finite."
            raise UpdateFailed(Fault.DIVERGED, detail)
        if update.update is None or bound is None or norm <= bound:
            return update, None
        if self.faults.norm_action == "reject":
            detail = f"The update of {client.title} has norm {norm:.6g}, more than faults.norm_bound={bound}."
            raise UpdateFailed(Fault.NORM_BOUND, detail)
        return replace(update, update=update.update * (bound / norm)), norm

    def _finetune(self, job: FineTuneJob, weights: torch.Tensor, reads: Reads) -> Steps:
        """The scores of the client's copy of the global weights after more training by the client."""
        client = self._client(job.round, job.client, False, weights, job.own, reads)
        model = client.finetune(job.epochs)
        read = reads.add(predict_all(self.evaluators, self.setup.engine, model, [job.client]))
        yield
        yield scored(self.evaluators, read(), [job.client])

    def _predict(self, job: PredictionBatch, weights: torch.Tensor) -> Steps:
        """The predictions of the job's model, made from the global weights [total]."""
        state, evaluator = job.model.state.to(weights.device), self.evaluators[job.evaluator]
        model: torch.Tensor | Mixture = self.setup.own_layers.complete(weights, state)
        if job.model.kind == "personal":
            with read_only(title(self.method), {"weights": weights, "state": state}):
                personal = self.method.personal(weights, state)
            personal = checked_personal(self.method, personal, weights)
            model = self.setup.own_layers.complete_personal(personal, state)
        yield evaluator.predict(self.setup.engine, model, job.rows)

    def _client(
        self, round: int, client: int, first: bool, weights: torch.Tensor, state: ClientState, reads: Reads
    ) -> LocalClient:
        return LocalClient(
            setup=self.setup,
            id=client,
            round=round,
            first=first,
            weights=weights,
            state=state.to(weights.device),
            method=title(self.method),
            reads=reads if self.setup.engine.lanes else None,
        )


def _with_masks_read(update: ClientUpdate, reads: Reads, room: Room) -> Callable[[], ClientUpdate]:
    """The update with the masks of its state on the CPU, after they are read. If there is room, they also stay on the
    device, where the client's next model needs them."""
    state = update.state
    assert state is not None
    masks = {
        name: item
        for name, item in state.items()
        if isinstance(item, PackedMask) and item.bits.device.type != "cpu"
    }
    read = reads.add([mask.bits for mask in masks.values()])

    def at_rest() -> ClientUpdate:
        on_cpu = {
            name: PackedMask(bits, mask.length, mask.bits if room.takes(mask.bits, bits.nbytes) else None)
            for (name, mask), bits in zip(masks.items(), read(), strict=True)
        }
        return replace(update, state=state | on_cpu) if on_cpu else update

    return at_rest
