"""A single run in a few lines: its data, clients, training and model. Nothing is loaded or run."""

from __future__ import annotations

from fedspa.config.plan import Plan
from fedspa.core.launch import usable_cores
from fedspa.costs.units import show_bytes, show_count
from fedspa.planning.cost_report import CostReport


def preview(plan: Plan) -> str:
    """Lines of a name and a few words each. The sizes of clients are equal shares, or only an average."""
    report, settings, source, names = CostReport.of(plan), plan.settings, plan.dataset, plan.names
    federation, training, sizes = settings.federation, settings.training, report.client_sizes
    of_classes = "" if source.is_regression else f" in {source.classes} classes"
    total, cores = report.parameters, plan.hardware.cores or usable_cores()
    if names["partition"] == "iid":
        shares = f"{min(sizes):,} to {max(sizes):,}" if min(sizes) < max(sizes) else f"{min(sizes):,}"
    else:  # only the data would tell
        shares = f"on average {sum(sizes) / len(sizes):,.0f}"
    first = sum(times for (_, first, *_), times in report.updates.items() if first)
    examples = source.rows_in_memory() * source.row_bytes
    vectors = 4 + bool(training.momentum)  # weights, gradient, mask, update
    vector_bytes = vectors * report.space.total * plan.hardware.dtype.itemsize
    facts = {
        "data": f"{names['dataset']}: {sum(sizes):,} training {source.shape_text}{of_classes}, "
        f"{show_bytes(sum(sizes) * source.row_bytes)}",
        "clients": f"{federation.clients:,} by partition={names['partition']}, {shares} training "
        f"{source.things} each",
        "rounds": f"{federation.rounds:,} of {show_count(federation.clients_per_round, 'client')}: "
        f"{show_count(report.updates.total(), 'client update')}, of which {first:,} are a client's first",
        "training": f"{show_count(training.epochs, 'epoch')} an update in batches of {training.batch_size}, "
        f"learning rate {training.lr:g} falling to {training.lr_at(federation.rounds - 1):.3g}",
        "model": f"{names['model']}: {total:,} parameters ({show_bytes(4 * total)}), {report.active_parameters:,} of "
        "them active in a client",
        "method": f"{names['method']}, mask={names['mask']}; tested: {', '.join(plan.method.kinds)} models",
        "computes": f"engine={names['engine']}, hardware={names['hardware']} with {cores} CPU cores",
        "memory": f"{show_bytes(examples)} {source.things}; {show_bytes(vector_bytes)} vectors of weights in each "
        f"process that trains; at most {plan.hardware.state_memory_gb:g} GB of clients' states; activations extra",
        "results": ", ".join(plan.loggers) or "the run's own folder only",
    }
    return "\n".join([*(f"{name:<9} {fact}" for name, fact in facts.items()), *plan.unused])
