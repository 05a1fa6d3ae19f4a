"""What a single run would do, in a few lines: who takes part, what is trained, on what. Nothing is loaded or run."""

from __future__ import annotations

from fedspa.config import Plan
from fedspa.costing.cost_report import CostReport
from fedspa.costing.units import show_bytes
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
        "results": ", ".join(plan.loggers) or "the run's own folder only",
    }
    return "\n".join(f"{name:<9} {fact}" for name, fact in facts.items())


def _first_visits(report: CostReport) -> int:
    return sum(times for (_, first, _), times in report.visits.items() if first)
