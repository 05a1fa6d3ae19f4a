"""Costs, times and numbers of things as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedspa.core import names
from fedspa.core.names import DENSITY


def show_count(count: int, thing: str) -> str:
    """A number of things: 1 round, 2,000 rounds."""
    return f"{count:,} {thing}{'s' * (count != 1)}"


def show_bytes(count: float) -> str:
    """Bytes in decimal units, as the paper's GB: 369200000000 is 369.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def show_saved(total: float | None, dense: float | None) -> str:
    """The part that is saved compared with dense training: 62.5 %, or "-" if it is unknown."""
    return f"{100 * (1 - total / dense):z.1f} %" if dense and total is not None else "-"


def result_tables(summary: Mapping[str, Any]) -> Iterator[list[list[str]]]:
    """The results of a run as tables for people: a head and rows of cells."""
    unit = names.unit(summary)
    for metric, scores in names.final_scores(summary).items():
        table = [[f"{metric}{unit and ' in %'}", "mean \u00b1 std", "worst decile", "clients"]]
        for kind, spread in scores.items():
            mean, std, worst = (names.shown(spread[part], unit) for part in ("mean", "std", "worst_decile"))
            table.append([kind, f"{mean} \u00b1 {std}", worst, str(spread["clients"])])
        yield table
    costs = [["cost", "this run", "dense", "saved"]]
    for title, own, rival, show in (
        ("traffic", names.TRAFFIC, names.TRAFFIC_DENSE, show_bytes),
        ("FLOPs", names.FLOPS, names.FLOPS_DENSE, show_flops),
    ):
        total, dense = summary[own], summary[rival]
        costs.append([title, show(total), show(dense), show_saved(total, dense)])
    if finetune := summary.get(names.FLOPS_FINETUNE):
        costs.append(["fine-tuning", show_flops(finetune), "-", "-"])
    yield costs


def show_density(summary: Mapping[str, Any]) -> str:
    """The density of a run's models: 0.5 asked, 0.29 to 0.5 measured."""
    return f"{summary['density_asked']:.4g} asked, {show_measured_density(summary)} measured"


def show_measured_density(summary: Mapping[str, Any]) -> str:
    """The density of the trained clients' models: 0.5, or 0.29 to 0.5 if they differ, or none."""
    if DENSITY not in summary:
        return "none"
    low, high = (f"{summary[f'{DENSITY}/{end}']:.4g}" for end in ("min", "max"))
    return low if low == high else f"{low} to {high}"


def show_time(seconds: float | None) -> str:
    """Seconds in a unit that gives two or three digits: 2.5 s, 75 s, 12.5 min, 31.7 h, 1,240 h; "-" if unknown."""
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    for length, unit in ((60, "min"), (3600, "h")):
        if seconds < 100 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 3600:,.0f} h"


def show_flops(count: float | None) -> str:
    """FLOPs such as 1.729e16, without a plus sign or zeros in the exponent; "-" if unknown."""
    if count is None:
        return "-"
    if not count:
        return "0"
    mantissa, exponent = f"{count:.3e}".split("e")
    return f"{mantissa}e{int(exponent)}"
