"""Predicts the costs of a run without data and training, by the same closed forms that a run adds up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from fedspa.communication.wire import update_bytes
from fedspa.communication.wire_tensors import message_bytes
from fedspa.config.network import build_model
from fedspa.config.plan import Plan
from fedspa.core import names
from fedspa.core.errors import check_range
from fedspa.core.records import Costs
from fedspa.core.weights import ParameterSpace
from fedspa.costs.charges import dense_costs
from fedspa.costs.network import VALUE_BYTES, NetworkCosts
from fedspa.data.sets import held_out_count
from fedspa.federated.sampling import sample_clients, sample_tested
from fedspa.planning.counting import (
    OtherMask,
    SummedCosts,
    Update,
    UpdateCosts,
    costliest,
    most,
    most_mixed,
)


@dataclass(frozen=True)
class CostReport:
    """The costs of a plan's run, if all clients have (nearly) the same size."""

    plan: Plan
    space: ParameterSpace
    network: NetworkCosts
    active: tuple[int, ...]
    """The active parameters of each tensor that travels, in a client's model by the layer sparsity."""

    @classmethod
    def of(cls, plan: Plan) -> CostReport:
        """The report of a plan. The network is built once, to measure it."""
        source, settings = plan.dataset, plan.settings
        check_range("federation.clients", settings.federation.clients, high=source.effective_train_size)
        network = build_model(plan)
        space = ParameterSpace.of(network)
        counted = NetworkCosts.of(network, source.input_shape, settings.costs.convention, source.input_dtype)
        return cls(plan, space, counted, tuple(plan.active_counts(space.shared) or space.shared.sizes))

    @property
    def parameters(self) -> int:
        """The number of parameters of the network, without running statistics."""
        return self.space.trained

    @property
    def active_parameters(self) -> int:
        """The number of active parameters in a client's model. Personal layers are never pruned."""
        return self.parameters - self.network.parameters + sum(self.active) - self.network.statistics

    @property
    def wire(self) -> str:
        """The type of the values in encoded messages."""
        return self.plan.settings.federation.wire or "fp32"

    @cached_property
    def client_sizes(self) -> list[int]:
        """The training rows of each client without validation and public rows: equal shares, up to one row."""
        return [rows - held_out_count(rows, self.plan.dataset.public_fraction) for rows in self._trainable]

    @property
    def public(self) -> tuple[int, int]:
        """The number of public rows, and of the network's outputs for each."""
        source = self.plan.dataset
        return sum(held_out_count(rows, source.public_fraction) for rows in self._trainable), source.outputs

    @cached_property
    def _trainable(self) -> list[int]:
        """The rows of each client without validation rows."""
        source, clients = self.plan.dataset, self.plan.settings.federation.clients
        share, rest = divmod(source.effective_train_size, clients)
        sizes = [share + (client < rest) for client in range(clients)]
        return [rows - held_out_count(rows, source.val_fraction) for rows in sizes]

    @cached_property
    def updates(self) -> Counter[Update]:
        """The number of the run's client updates of each cost. The sampling of clients is replayed."""
        seed, federation, method = self.plan.settings.seed, self.plan.settings.federation, self.plan.method
        updates: Counter[Update] = Counter()
        trained: dict[int, int] = {}  # the round of each client's last update
        found: dict[int, int] = {}  # the round in which each client's mask was found
        kind_of, counts_of, last_search = cache(self._kind_of), cache(self._counts), -2
        alike: dict[Any, int] = {}  # the first round of each kind, and of each plan
        for round in range(federation.rounds):
            for client in sample_clients(seed, round, federation.clients, federation.clients_per_round):
                first, before = client not in trained, found.get(client, -1)
                finds, changes = first and method.finds_first_mask, self._changes(before, round)
                like = round if finds else alike.setdefault(("kind", kind_of(round)), round)
                planned = alike.setdefault(("plan", counts_of(before)), before)
                stale = trained.get(client, -1) <= last_search
                updates[Update(self.client_sizes[client], first, like, planned, changes, stale)] += 1
                trained[client] = round
                if finds or changes:
                    found[client] = round
            last_search = round if method.searching(round) else last_search
        return updates

    def _changes(self, found: int, round: int) -> bool:
        """True if a client's search in a round changes a mask that was found in an earlier one."""
        return self.plan.method.searching(round) and self.plan.mask.changes(found, round)

    def _counts(self, round: int) -> Any:
        """The planned counts of a mask that is found in a round."""
        counts = None if self.plan.mask is None else self.plan.mask.counts(round)
        return tuple(counts) if isinstance(counts, Sequence) else counts

    def _kind_of(self, round: int) -> Any:
        """A key of rounds in which a search has the same costs. The bits of a new mask are charged."""
        searcher = self.plan.mask
        if searcher is None:
            return None
        searching, shape = self.plan.method.searching(round), self._countings[-1].shape(self.network, round)
        return searching, searcher.exchanging(round), searcher.receives_dense(round), shape

    def update(self, update: Update) -> Costs:
        """The costs of one client update, with its encoded bytes."""
        return most([self._update(count, self.network, update) for count in self._countings])

    def _update(self, count: UpdateCosts, network: NetworkCosts, update: Update) -> Costs:
        costs = travels = count(network, update)
        if network.convention != "honest":
            travels = count(replace(network, convention="honest"), update)
        further, messages = self._messages[update.prepares]
        weights = replace(travels, up_bytes=travels.up_bytes - VALUE_BYTES * sum(further))
        pieces = len(self.space.shared.mask_sizes)
        encoded = update_bytes(weights, pieces, self.wire, network.statistics, messages)
        return replace(costs, encoded_bytes=encoded + sum(map(message_bytes, further)))

    @property
    def last_update(self) -> Update:
        """An update of the largest client, in a round that searches, under a mask of the last round."""
        last = self.plan.settings.federation.rounds - 1
        return Update(
            max(self.client_sizes), first=False, round=0, found=last, changes=self._changes(last, 0)
        )

    @cached_property
    def _messages(self) -> list[tuple[tuple[int, int], int]]:
        """The parts that all messages of updates have in common, and those of the step before round 1."""
        steps = [False, True] if self.plan.method.prepares else [False]
        return [self._countings[0].messages(self.network, prepares) for prepares in steps]

    @cached_property
    def _countings(self) -> list[UpdateCosts]:
        """The ways to count. If the plan leaves the counts of tensors open, the most of two ways is an upper bound."""
        method, training, mask = self.plan.method, self.plan.settings.training, self.plan.mask
        # `costliest` has the most FLOPs, `most_mixed` the longest mask.
        fills = [costliest] if mask is None or mask.keeps_tensors else [costliest, most_mixed]
        return [UpdateCosts(method, self.space.shared, training, self.public, fill) for fill in fills]

    @cached_property
    def total(self) -> Costs:
        """The costs of the whole run."""
        return most([self._total(count) for count in self._countings]) + self.preparation

    def _total(self, count: UpdateCosts) -> Costs:
        """The costs of all updates. Those whose masks have the same full and empty tensors are counted together."""
        alike: dict[Any, Counter[Update]] = defaultdict(Counter)
        for update, times in self.updates.items():
            alike[update._replace(found=-1), count.shape(self.network, update.found)][update] += times
        return sum((self._together(count, updates) for updates in alike.values()), Costs())

    def _together(self, count: UpdateCosts, updates: Counter[Update]) -> Costs:
        """The costs of updates that differ only in the counts of their masks.

        Only the first one is counted with its own mask, and all others by the sum of their counts.
        """
        first, others = next(iter(updates)), updates.total() - 1
        one = self._update(count, self.network, first)
        if len(updates) == 1:
            return one * updates.total()
        planned = [(count.counts(self.network, update.found), times) for update, times in updates.items()]
        mask = planned[0][0]
        summed = [
            sum(times * counts[i] for counts, times in planned) - others * n for i, n in enumerate(mask)
        ]
        network = SummedCosts(**vars(self.network), mask=mask, instead=tuple(summed))
        try:
            return one * others + self._update(count, network, first)
        except OtherMask:
            return self._sum(lambda update: self._update(count, self.network, update), updates)

    @cached_property
    def preparation(self) -> Costs:
        """The costs of the step before round 1, in which every client takes part; nothing for most methods."""
        if not self.plan.method.prepares:
            return Costs()
        updates = Counter(Update(rows, first=True, round=0, prepares=True) for rows in self.client_sizes)
        return self._sum(self.update, updates)

    @cached_property
    def dense_total(self) -> Costs:
        """The costs of the same client updates in FedAvg."""
        samples = self.plan.settings.training.samples
        return self._sum(lambda update: dense_costs(self.network, samples(update.rows)), self.updates)

    @staticmethod
    def _sum(costs: Callable[[Update], Costs], updates: Counter[Update]) -> Costs:
        return sum((costs(update) * times for update, times in updates.items()), Costs())

    @property
    def finetune_flops(self) -> int | None:
        """The FLOPs of fine-tuning the dense global model by every tested client; 0 without it. The totals leave
        them out."""
        settings, sizes = self.plan.settings, self.client_sizes
        if "global" not in self.plan.method.kinds:
            return 0
        tested = sample_tested(settings.seed, len(sizes), settings.eval.clients)
        samples = [settings.training.samples(sizes[k], settings.finetune.epochs) for k in tested]
        return self.network.training_flops(None, sum(samples))

    @property
    def notes(self) -> list[str]:
        """Sentences about the limits of the figures, and about settings that are not used."""
        method, partition = self.plan.method, self.plan.names["partition"]
        notes = [f"{self.network.remark}."] if self.network.remark else []
        if partition != "iid":
            notes.append(
                f"partition={partition}: all clients are taken to be of equal size; "
                "a run adds up the costs of its true ones."
            )
        if method.starts_dense:
            notes.append(
                f"method={method.name} starts dense, and these are the costs of its start: "
                "what it saves later on is only known in a run."
            )
        mask = self.plan.mask
        if mask is not None and not isinstance(mask.counts(0), Sequence):
            notes.append(
                f"mask={mask.name} finds out in the run how many parameters of each tensor are active: FLOPs and mask "
                "bytes are upper bounds; a run adds up those of its true masks."
            )
        faults = self.plan.settings.faults
        if faults.dropout or faults.deadline or faults.loss or faults.corruption:
            notes.append("faults: these are the costs without them; a client that drops out is charged less.")
        return [*notes, *(f"{sentence}." for sentence in self.plan.unused)]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values: FLOPs, bytes and counts in whole numbers."""
        total, dense = self.total, self.dense_total
        return {
            **{group: name for group, name in self.plan.names.items() if group not in ("hardware", "engine")},
            "sparsity": self.plan.settings.sparsity,
            "convention": self.network.convention,
            "wire": self.wire,
            "client_updates": self.updates.total(),
            "forward_flops": self.network.forward_flops(self.active),
            "forward_flops_dense": self.network.forward_flops(),
            **names.costs(total, dense),
            names.FLOPS_FINETUNE: self.finetune_flops,
            "parameters": {"total": self.parameters, "active": self.active_parameters},
            "tensors": self.tensors,
            "notes": self.notes,
        }

    @property
    def tensors(self) -> list[dict[str, Any]]:
        """The facts of each tensor: its active parameters, and its forward FLOPs for a sample."""
        kept = self.space.sizes[len(self.active) :]
        columns = (self.space.names, self.space.shapes, self.space.sizes, (*self.active, *kept))
        network = self.network
        known = not network.uncounted
        shared = [flops * active for flops, active in zip(network.flops_per_active, self.active, strict=True)]
        statistics = [0] * (len(kept) - len(network.personal_flops))  # of personal BatchNorm layers
        return [
            {
                "name": name,
                "shape": list(shape),
                "parameters": size,
                "active": active,
                "density": active / size,
                "flops": flops if known else None,
            }
            for name, shape, size, active, flops in zip(
                *columns, (*shared, *network.personal_flops, *statistics), strict=True
            )
        ]
