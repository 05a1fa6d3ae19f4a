"""What a run will cost, told before it: no data, no training, the same closed forms that a run adds up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fedspa.communication.wire import visit_bytes
from fedspa.communication.wire_tensors import message_bytes
from fedspa.config.network import build_model
from fedspa.config.plan import Plan
from fedspa.core.errors import check_range
from fedspa.core.records import Costs
from fedspa.core.weights import ParameterSpace
from fedspa.costs.charges import dense_costs
from fedspa.costs.network import VALUE_BYTES, NetworkCosts
from fedspa.costs.units import show_bytes, show_flops, show_saved
from fedspa.federated.sampling import sample_clients, sample_tested
from fedspa.partition.clients import held_out
from fedspa.planning.counting import UpdateCosts

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


@dataclass(frozen=True)
class CostReport:
    """The costs of a plan's run, with every client of (nearly) the same size."""

    plan: Plan
    space: ParameterSpace
    network: NetworkCosts
    active: tuple[int, ...]
    """Active parameters of each tensor that travels, in the model that a client trains."""

    @classmethod
    def of(cls, plan: Plan) -> CostReport:
        """Builds the network once, to measure it."""
        source, settings = plan.dataset, plan.settings
        check_range("federation.clients", settings.federation.clients, high=source.effective_train_size)
        network = build_model(plan, source.channels, source.image_size, source.classes)
        shape = (source.channels, source.image_size, source.image_size)
        space = ParameterSpace.of(network)
        counted = NetworkCosts.of(network, shape, settings.costs.convention)
        return cls(plan, space, counted, tuple(plan.active_counts(space.shared) or space.shared.sizes))

    @property
    def parameters(self) -> int:
        """Of the network, running statistics not among them."""
        return self.space.trained

    @property
    def active_parameters(self) -> int:
        """Of the model that a client trains; those of layers that it keeps to itself are never pruned."""
        return self.parameters - self.network.parameters + sum(self.active) - self.network.statistics

    @property
    def wire(self) -> str:
        """Type of the values in the encoded messages."""
        return self.plan.settings.federation.wire or "fp32"

    @cached_property
    def client_sizes(self) -> list[int]:
        """Training rows of each client, its validation rows not among them: equal shares, to within one row."""
        source, clients = self.plan.dataset, self.plan.settings.federation.clients
        share, rest = divmod(source.effective_train_size, clients)
        held = [share + (client < rest) for client in range(clients)]
        return [rows - held_out(rows, source.val_fraction) for rows in held]

    @cached_property
    def visits(self) -> Counter[tuple[int, bool, int]]:
        """The run's updates by client size, whether they are a client's first, and a round that costs as much.

        The sampling is replayed. Rounds in which masks are searched for cost as the first of them, others likewise.
        """
        seed, federation = self.plan.settings.seed, self.plan.settings.federation
        visits: Counter[tuple[int, bool, int]] = Counter()
        seen: set[int] = set()
        alike: dict[bool, int] = {}
        for round in range(federation.rounds):
            searching = self.plan.mask is None or self.plan.mask.searching(round)
            like = alike.setdefault(searching, round)
            for client in sample_clients(seed, round, federation.clients, federation.clients_per_round):
                visits[self.client_sizes[client], client not in seen, like] += 1
                seen.add(client)
        return visits

    def visit(self, rows: int, first: bool, round: int = 0) -> Costs:
        """One update of a client of so many rows in a round (from 0), encoded bytes included."""
        honest = replace(self.network, convention="honest")
        costs, travels = (
            self._update_costs(network, rows, round=round, first=first) for network in (self.network, honest)
        )
        further = sum(self._further)
        weights = replace(travels, up_bytes=travels.up_bytes - VALUE_BYTES * further)
        encoded = visit_bytes(weights, len(self.active), self.wire, self.network.statistics)
        return replace(costs, encoded_bytes=encoded + sum(map(message_bytes, self._further)))

    @cached_property
    def _further(self) -> tuple[int, int]:
        """Values of further tensors on their way down and up."""
        return self._update_costs.further_values(self.network)

    @cached_property
    def _update_costs(self) -> UpdateCosts:
        return UpdateCosts(self.plan.method, self.space.shared, self.plan.settings.training, self.active)

    def dense_visit(self, rows: int, first: bool, round: int = 0) -> Costs:
        """The same update in FedAvg."""
        return dense_costs(self.network, self.plan.settings.training.samples(rows))

    @cached_property
    def total(self) -> Costs:
        """The whole run."""
        return self._sum(self.visit) + self.preparation

    @cached_property
    def preparation(self) -> Costs:
        """The step before round 1, in which every client takes part; nothing for most methods."""
        if not self.plan.method.prepares:
            return Costs()
        sizes = Counter(self.client_sizes)
        return sum(
            (
                self._update_costs(self.network, rows, round=0, first=True, prepares=True) * count
                for rows, count in sizes.items()
            ),
            Costs(),
        )

    @cached_property
    def dense_total(self) -> Costs:
        """The same visits in FedAvg."""
        return self._sum(self.dense_visit)

    def _sum(self, visit: Callable[[int, bool, int], Costs]) -> Costs:
        return sum((visit(*kind) * times for kind, times in self.visits.items()), Costs())

    @property
    def finetune_flops(self) -> int | None:
        """Fine-tuning the dense global model by every tested client, which the totals leave out: 0 without it."""
        settings, sizes = self.plan.settings, self.client_sizes
        if "global" not in self.plan.method.kinds:
            return 0
        tested = sample_tested(settings.seed, len(sizes), settings.eval.clients)
        samples = [settings.training.samples(sizes[k], settings.finetune.epochs) for k in tested]
        return self.network.training_flops(None, sum(samples))

    @property
    def notes(self) -> list[str]:
        """What the figures leave open."""
        method, partition = self.plan.method, self.plan.names["partition"]
        notes = [f"{self.network.remark}."] if self.network.remark else []
        if partition != "iid":
            notes.append(
                f"partition={partition}: all clients are taken to be of equal size; "
                "a run adds up the costs of its true ones."
            )
        if method.uses_sparsity and not method.uses_mask:
            notes.append(
                f"method={method.name} starts dense, and these are the costs of its start: "
                "what pruning saves is only known in a run."
            )
        mask = self.plan.mask
        if mask is not None and not mask.keeps_counts:
            notes.append(
                f"mask={mask.name} finds out how many parameters of each tensor are active: these are the costs of "
                f"layer_sparsity={self.plan.names['layer_sparsity']}; a run adds up those of its true masks."
            )
        faults = self.plan.settings.faults
        if faults.dropout or faults.deadline or faults.loss or faults.corruption:
            notes.append("faults: these are the costs without them; a client that drops out is charged less.")
        return notes

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values: FLOPs, bytes and counts in whole numbers."""
        total, dense = self.total, self.dense_total
        return {
            **{group: name for group, name in self.plan.names.items() if group not in ("hardware", "engine")},
            "sparsity": self.plan.settings.sparsity,
            "convention": self.network.convention,
            "wire": self.wire,
            "visits": self.visits.total(),
            "forward_flops": {
                "dense": self.network.forward_flops(),
                "sparse": self.network.forward_flops(self.active),
            },
            "train_flops": total.train_flops,
            "search_flops": total.search_flops,
            "total_flops": total.flops,
            "finetune_flops": self.finetune_flops,
            "dense_total_flops": dense.flops,
            "traffic_bytes": {
                "down": total.down_bytes,
                "up": total.up_bytes,
                "masks": total.mask_bytes,
                "total": total.traffic_bytes,
                "encoded": total.encoded_bytes,
                "dense_total": dense.traffic_bytes,
            },
            "parameters": {"total": self.parameters, "active": self.active_parameters},
            "tensors": self.tensors,
            "notes": self.notes,
        }

    @property
    def tensors(self) -> list[dict[str, Any]]:
        """Each tensor: its share of the active parameters and of the forward FLOPs of a sample."""
        kept = self.space.sizes[len(self.active) :]
        columns = (self.space.names, self.space.shapes, self.space.sizes, (*self.active, *kept))
        network = self.network
        known = not network.uncounted
        shared = [flops * active for flops, active in zip(network.flops_per_active, self.active, strict=True)]
        statistics = [0] * (len(kept) - len(network.personal_flops))  # of kept BatchNorm layers
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


def show(report: CostReport) -> RenderableType:
    """The report for people."""
    from rich.console import Group
    from rich.text import Text

    federation = report.plan.settings.federation
    title = f"{report.plan.settings.name}: {report.visits.total():,} visits in {federation.rounds:,} rounds"
    notes = [Text(note) for note in report.notes]
    return Group(Text(title, style="bold"), "", _tensor_table(report), "", _cost_table(report), "", *notes)


def _tensor_table(report: CostReport) -> Table:
    table = _table("tensor", "shape", "active", "density", "FLOPs a sample")
    for tensor in report.tensors:
        shape = "x".join(map(str, tensor["shape"]))
        density = f"{tensor['density']:.3f}"
        table.add_row(tensor["name"], shape, f"{tensor['active']:,}", density, show_flops(tensor["flops"]))
    active, total = report.active_parameters, report.parameters
    flops = show_flops(report.network.forward_flops(report.active))
    table.add_section()
    table.add_row("all", "", f"{active:,}", f"{active / total:.3f}", flops)
    table.add_row("dense", "", f"{total:,}", "1.000", show_flops(report.network.forward_flops()))
    return table


def _cost_table(report: CostReport) -> Table:
    largest = max(report.client_sizes)
    visit, total, dense = report.visit(largest, first=False), report.total, report.dense_total
    table = _table(f"costs ({report.network.convention})", "a visit", "the run", "dense", "saved")

    def row(title: str, show: Callable[[Any], str], cost: Callable[[Costs], int | None]) -> None:
        table.add_row(title, show(cost(visit)), show(cost(total)), "", "")

    def compared(
        title: str, show: Callable[[Any], str], cost: Callable[[Costs], int | None], rival: int | None
    ) -> None:
        saved = show_saved(cost(total), rival)
        table.add_row(title, show(cost(visit)), show(cost(total)), show(rival), saved)

    compared("FLOPs", show_flops, lambda costs: costs.flops, dense.flops)
    row("  training", show_flops, lambda costs: costs.train_flops)
    row("  mask search", show_flops, lambda costs: costs.search_flops)
    if report.finetune_flops:
        table.add_row("fine-tuning (on top)", "", show_flops(report.finetune_flops), "", "")
    compared("traffic", show_bytes, lambda costs: costs.traffic_bytes, dense.traffic_bytes)
    row("  values down", show_bytes, lambda costs: costs.down_bytes)
    row("  values up", show_bytes, lambda costs: costs.up_bytes)
    row("  masks", show_bytes, lambda costs: costs.mask_bytes)
    compared(f"encoded ({report.wire})", show_bytes, lambda costs: costs.encoded_bytes, dense.traffic_bytes)
    return table


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        table.add_column(title, justify="left" if title == titles[0] else "right", no_wrap=True)
    return table
