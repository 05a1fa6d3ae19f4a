"""The costs of a run as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedspa.costs.units import show_bytes, show_count, show_flops, show_saved
from fedspa.planning.cost_report import CostReport


def show(report: CostReport) -> RenderableType:
    """The report as tables, with its notes below."""
    settings = report.plan.settings
    updates = show_count(report.updates.total(), "client update")
    title = f"{settings.name}: {updates} in {show_count(settings.federation.rounds, 'round')}"
    notes = [Text(note) for note in report.notes]
    if report.update(report.last_update) * report.updates.total() != report.total:
        of_a_search = ", in a round that searches for masks" if report.total.search_flops else ""
        notes.insert(
            0,
            Text(
                f'The column "an update" shows the largest client{of_a_search}. '
                "Other updates may cost more or less."
            ),
        )
    return Group(Text(title, style="bold"), "", _tensor_table(report), "", _cost_table(report), "", *notes)


def _tensor_table(report: CostReport) -> Table:
    table = _table("tensor", "shape", "active", "density", "FLOPs a sample")
    for tensor in report.tensors:
        shape, density = "x".join(map(str, tensor["shape"])), f"{tensor['density']:.3f}"
        table.add_row(tensor["name"], shape, f"{tensor['active']:,}", density, show_flops(tensor["flops"]))
    active, total = report.active_parameters, report.parameters
    flops = show_flops(report.network.forward_flops(report.active))
    table.add_section()
    table.add_row("all", "", f"{active:,}", f"{active / total:.3f}", flops)
    table.add_row("dense", "", f"{total:,}", "1.000", show_flops(report.network.forward_flops()))
    return table


def _cost_table(report: CostReport) -> Table:
    update, total = report.update(report.last_update), report.total
    flops, traffic = report.dense_total.flops, report.dense_total.traffic_bytes
    table = _table(f"costs ({report.network.convention})", "an update", "the run", "dense", "saved")
    rows: list[tuple[str, str, int | None]] = [
        ("FLOPs", "flops", flops),
        ("  training", "train_flops", None),
        ("  mask search", "search_flops", None),
        ("traffic", "traffic_bytes", traffic),
        ("  values down", "down_bytes", None),
        ("  values up", "up_bytes", None),
        ("  masks", "mask_bytes", None),
        (f"encoded ({report.wire})", "encoded_bytes", traffic),
    ]
    for title, name, dense in rows:
        text: Callable[[Any], str] = show_flops if name.endswith("flops") else show_bytes
        cost, compared = getattr(total, name), not title.startswith(" ")
        beside = (text(dense), show_saved(cost, dense)) if compared else ("", "")
        table.add_row(title, text(getattr(update, name)), text(cost), *beside)
        if name == "search_flops" and report.finetune_flops:
            table.add_row("fine-tuning (on top)", "", show_flops(report.finetune_flops), "", "")
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        table.add_column(title, justify="left" if title == titles[0] else "right", no_wrap=True)
    return table
