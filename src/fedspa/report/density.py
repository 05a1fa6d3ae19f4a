"""How dense the clients' models came out, beside what was asked for."""

from __future__ import annotations

from fedspa.report import measures
from fedspa.report.formats import MISSING, Cell, Column, Table
from fedspa.report.study import Study
from fedspa.tracking.measures import density_text


def density_table(study: Study) -> Table | None:
    """Methods by data settings; None where no run was asked for, or has, anything but dense models."""
    known = [run.summary["density"] for run in study.all_runs if measures.density([run])]
    if all(density["asked"] == density["min"] == 1 for density in known):
        return None
    columns = [Column(s.label, name) for s in study.settings for name in ("asked", "measured")]
    rows = []
    for row in study.rows:
        cells: list[Cell] = []
        for setting in study.settings:
            runs = study.runs(row, setting)
            found = [run.summary["density"] for run in runs if measures.density([run])]
            if not found:
                cells += [Cell(MISSING)] * 2
                continue
            low, high = min(d["min"] for d in found), max(d["max"] for d in found)
            measured = density_text({"mean": low, "min": low, "max": high})
            cells += [Cell(f"{found[0]['asked']:.4g}"), Cell(measured)]
        rows.append((row.label, cells))
    caption = (
        "Share of the parameters that are active: as asked for (1 \u2212 sparsity), and as measured at the end of the "
        "run in the visited clients\u2019 models, from the sparsest to the densest of all seeds. Tensors that "
        "layer_sparsity.mask_scope leaves dense, and counts rounded down, make the two differ. Sub-FedAvg starts "
        "dense and prunes towards what was asked."
    )
    return Table("density", "Density", caption, columns, rows)
