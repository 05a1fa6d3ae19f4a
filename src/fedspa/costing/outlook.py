"""What a single run would do, in a few lines: who takes part, what is trained, on what. Nothing is loaded or run."""

from __future__ import annotations

import torch

from fedspa.config import Plan
from fedspa.costing.cost_report import CostReport
from fedspa.costing.units import show_bytes
from fedspa.masks.packed import PackedMask
from fedspa.methods.base import Origin
from fedspa.running.launch import usable_cores


def outlook(plan: Plan) -> str:
    """Lines of a name and a few words each. Sizes of clients are those of equal shares, unless the data is dealt so."""
    report, settings, source, names = CostReport.of(plan), plan.settings, plan.dataset, plan.names
    federation, training, sizes = settings.federation, settings.training, report.client_sizes
    images = sum(sizes) * source.channels * source.image_size**2
    shape = f"{source.channels} x {source.image_size} x {source.image_size}"
    active, total = sum(report.active), report.space.total
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
    return "\n".join(f"{name:<9} {fact}" for name, fact in facts.items())


def _memory(report: CostReport) -> str:
    """What can be told of it: activations depend on the batch, and imports come before."""
    plan, total = report.plan, report.space.total
    vectors = 4 + bool(plan.settings.training.momentum)  # weights, gradient, mask, update
    states = min(_first_visits(report) * _state_bytes(plan, total), plan.hardware.state_memory_gb * 1e9)
    return (
        f"{show_bytes(plan.dataset.bytes_in_memory)} images; {show_bytes(4 * total * vectors)} vectors of weights in "
        f"each process that trains; at most {show_bytes(states)} of clients' states; activations come on top"
    )


def _state_bytes(plan: Plan, total: int) -> int:
    """Of what is remembered of a visited client."""
    mask = PackedMask.pack(torch.ones(total))
    origin = Origin(torch.empty(total, device="meta"), lambda client: mask, mask)
    tensors = (
        item.bits if isinstance(item, PackedMask) else item
        for item in plan.method.first_state(0, origin).values()
    )
    return sum(tensor.nbytes for tensor in tensors)


def _first_visits(report: CostReport) -> int:
    return sum(times for (_, first, _), times in report.visits.items() if first)
