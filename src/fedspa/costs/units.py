"""Costs as people read them."""

from __future__ import annotations


def show_bytes(count: float) -> str:
    """Decimal units, as the paper's GB: 369200000000 is 369.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def show_saved(total: float | None, dense: float | None) -> str:
    """How much less than dense training that is: 62.5 %, or "-" where it is not known."""
    return f"{100 * (1 - total / dense):z.1f} %" if dense and total is not None else "-"


def show_time(seconds: float | None) -> str:
    """In the unit that leaves two or three digits: 2.5 s, 75 s, 12.5 min, 31.7 h, 1,240 h; "-" where not known."""
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    for length, unit in ((60, "min"), (3600, "h")):
        if seconds < 100 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 3600:,.0f} h"


def show_flops(count: float | None) -> str:
    """1.729e16, with the exponent as people write it; "-" where the FLOPs are not known."""
    if count is None:
        return "-"
    if not count:
        return "0"
    mantissa, exponent = f"{count:.3e}".split("e")
    return f"{mantissa}e{int(exponent)}"
