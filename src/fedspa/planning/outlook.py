"""What a single run would do, in a few lines: who takes part, what is trained, on what. Nothing is loaded or run."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedspa.config.plan import Plan
from fedspa.core.client import Initial
from fedspa.core.client_state import Item
from fedspa.core.launch import usable_cores
from fedspa.core.packed_mask import PackedMask
from fedspa.core.weights import ParameterSpace
from fedspa.costs.units import show_bytes
from fedspa.federated.own_layers import OwnLayers
from fedspa.masks.base import MaskSearcher
from fedspa.masks.search_input import SearchInput
from fedspa.planning.cost_report import CostReport


def outlook(plan: Plan) -> str:
    """Lines of a name and a few words each. Sizes of clients are those of equal shares, unless the data is dealt so."""
    report, settings, source, names = CostReport.of(plan), plan.settings, plan.dataset, plan.names
    federation, training, sizes = settings.federation, settings.training, report.client_sizes
    images = sum(sizes) * source.image_bytes
    shape = f"{source.channels} x {source.image_size} x {source.image_size}"
    active, total = report.active_parameters, report.parameters
    shares = f"{min(sizes):,} to {max(sizes):,}" if min(sizes) < max(sizes) else f"{min(sizes):,}"
    about = "" if names["partition"] == "iid" else "about "
    facts = {
        "data": f"{names['dataset']}: {sum(sizes):,} training images of {shape} in {source.classes} classes, "
        f"{show_bytes(images)}",
        "clients": f"{federation.clients:,} by partition={names['partition']}, {about}{shares} training images each",
        "rounds": f"{federation.rounds:,} of {federation.clients_per_round:,} clients: "
        f"{report.visits.total():,} visits, of which {_first_visits(report):,} are a client's first",
        "training": f"{training.epochs} epochs a visit in batches of {training.batch_size}, learning rate "
        f"{training.lr:g} falling to {training.lr_at(federation.rounds - 1):.3g}",
        "model": f"{names['model']}: {total:,} parameters ({show_bytes(4 * total)}), {active:,} of them active in "
        "a client",
        "method": f"{names['method']}, mask={names['mask']}; tested: {', '.join(plan.method.kinds)} models",
        "computes": f"engine={names['engine']}, hardware={names['hardware']} with "
        f"{plan.hardware.cores or usable_cores()} CPU cores",
        "memory": _memory(report),
        "results": ", ".join(plan.loggers) or "the run's own folder only",
    }
    return "\n".join([*(f"{name:<9} {fact}" for name, fact in facts.items()), *plan.unused])


def _memory(report: CostReport) -> str:
    """What can be told of it: activations depend on the batch, and imports come before."""
    plan, source = report.plan, report.plan.dataset
    vectors = 4 + bool(plan.settings.training.momentum)  # weights, gradient, mask, update
    weights = vectors * report.space.total * plan.hardware.dtype.itemsize
    images = source.images_in_memory() * source.image_bytes
    states = min(_first_visits(report) * _state_bytes(report), plan.hardware.state_memory_gb * 1e9)
    return (
        f"{show_bytes(images)} images; {show_bytes(weights)} vectors of weights in each process that trains; at most "
        f"{show_bytes(states)} of clients' states; activations come on top"
    )


def _state_bytes(report: CostReport) -> int:
    """Of what is remembered of a visited client: its method's items, its mask searcher's, and its own layers."""
    plan, shared = report.plan, report.space.shared
    dtype, mask = plan.hardware.dtype, PackedMask.pack(torch.ones(shared.total))
    initial = Initial(torch.empty(shared.total, dtype=dtype, device="meta"), lambda client: mask, mask)
    own = OwnLayers(
        torch.empty(report.space.total - shared.total, dtype=dtype, device="meta"),
        plan.method.trains_personal,
    )
    items = [*plan.method.client_init(0, initial).values(), *own.first.values()]
    if plan.mask is not None:
        items += _remembered(plan.mask, shared.parameters).values()
    return sum((item.bits if isinstance(item, PackedMask) else item).nbytes for item in items)


def _remembered(searcher: MaskSearcher, space: ParameterSpace) -> Mapping[str, Item]:
    """What a searcher keeps of a client for whom it has just found a mask."""
    nothing = torch.zeros(1).expand(space.total)
    search = SearchInput(
        space=space,
        mask=nothing,
        weights=nothing,
        gradient=nothing,
        round=0,
        generator=torch.Generator(),
        counts=space.sizes,
        active=space.sizes,
    )
    return searcher.remember(search, torch.ones(space.total))


def _first_visits(report: CostReport) -> int:
    return sum(times for (_, first, _), times in report.visits.items() if first)
