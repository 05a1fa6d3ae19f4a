"""A report: its facts, tables and figures, written as one HTML page, in Markdown, in LaTeX and as results.csv."""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd

from fedspa.core import names
from fedspa.core.errors import listed, written
from fedspa.core.files import write_whole
from fedspa.core.paths import git, project_root
from fedspa.costs.units import show_count
from fedspa.report import tables
from fedspa.report.figures import DRAWN
from fedspa.report.panels import Picture
from fedspa.report.paper import paper_tables
from fedspa.report.runs import varied
from fedspa.report.study import Setting, Study, in_order
from fedspa.report.table import Table

TEX = {
    "\\": r"\textbackslash{}", "\u00b1": r"$\pm$", "\u2212": "$-$", "\u2013": "--", ">": "$>$", "<": "$<$",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\u2019": "'", "\u00d7": r"$\times$",
    "\u2265": r"$\geq$", **{char: f"\\{char}" for char in "%_&#${}"},
}  # fmt: skip
"""Characters that LaTeX does not print as they are."""


@dataclass(frozen=True)
class Report:
    """All that a report says, in any format."""

    title: str
    facts: list[str]
    tables: list[Table]
    pictures: list[Picture]
    left_out: list[str]


def make_report(study: Study, *, targets: Sequence[float] = (), beside_paper: bool = False) -> Report:
    """Compute the tables and draw the figures. `targets`: accuracies in percent, instead of those of the runs."""
    printed = list(paper_tables(study, targets)) if beside_paper else []
    facts = list(_facts(study))
    if beside_paper and not printed:
        facts.append(
            "No cell of this study is one of the paper\u2019s: those have its data set, network and partition, all "
            "training images and 100 clients."
        )
    drawn = (draw(study, setting) for setting in study.settings for draw in DRAWN)
    main, *more = tables.all_tables(study, targets)
    return Report(
        title=_title(study),
        facts=facts,
        tables=[main, *printed, *more],
        pictures=[picture for picture in drawn if picture],
        left_out=[f"{where}: {why}." for where, why in study.left_out],
    )


def write_report(report: Report, study: Study, folder: Path) -> Path:
    """Write index.html, report.md, tables.tex, results.csv and figures/; returns the page's path."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    drawings = {}
    for picture in report.pictures:
        svg = _svg(picture)
        drawings[picture.name] = base64.b64encode(svg).decode()
        (folder / "figures" / f"{picture.name}.svg").write_bytes(svg)
        picture.figure.set_layout_engine("none")  # it is laid out now, which takes as long as drawing
        png = folder / "figures" / f"{picture.name}.png"
        picture.figure.savefig(png, dpi=150, metadata={"Software": None})
    results(study, report.tables).to_csv(folder / "results.csv", index=False, lineterminator="\n")
    for name in ("report.md", "tables.tex"):
        write_whole(folder / name, render(name, report=report))
    links = [(run.name, _link(run.folder, folder)) for run in study.runs]
    page = folder / "index.html"
    write_whole(page, render("page.html", report=report, drawings=drawings, links=links))
    return page


def results(study: Study, of: Sequence[Table]) -> pd.DataFrame:
    """The numbers of the tables with all their digits, a row for each number.

    A cell without runs has 0 seeds and a blank mean. A goal that some seed did not reach has a blank mean;
    `reached` is the number of seeds that did.
    """
    found = []
    for table in of:
        for row, cells in table.lines.items():
            for column, cell in zip(table.columns, cells, strict=True):
                runs = column.setting.runs_of(row)
                if not column.quantity or (runs and not cell.values):
                    continue
                number = {
                    "dataset": column.setting.dataset, "split": column.setting.split, "row": row.label,
                    "method": row.method, "mask": row.mask, "sparsity": runs[0].summary["sparsity"] if runs else None,
                    "kind": column.kind, "quantity": column.quantity, "target": column.target, "unit": column.unit,
                    "mean": cell.mean, "std": cell.std, "seeds": len(cell.values),
                    "reached": sum(map(math.isfinite, cell.values)) if column.target and runs else None,
                }  # fmt: skip
                found.append(number)
    return pd.DataFrame(found).astype({"reached": "Int64"})


def render(template: str, **values: Any) -> str:
    """Fill in a template of this package."""
    from jinja2 import Environment, PackageLoader, select_autoescape

    environment = Environment(
        loader=PackageLoader("fedspa.report"),
        autoescape=select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["md"] = lambda text: re.sub(r"([|*_<>])", r"\\\1", text)
    environment.filters["tex"] = lambda text: "".join(TEX.get(char, char) for char in text)
    return environment.get_template(template).render(**values)


def _title(study: Study) -> str:
    """The page's title, such as `FedSpa (DST), FedAvg and Ditto on CIFAR-10`."""
    methods = list(dict.fromkeys(row.name for row in study.rows))
    data = list(dict.fromkeys(setting.data for setting in study.settings))
    compared = listed(methods) if len(methods) < 5 else f"{len(methods)} methods"
    return f"{compared} on {listed(data)}"


def _facts(study: Study) -> Iterator[str]:
    versions = listed(sorted({str(run.summary.get("version", "unknown")) for run in study.runs}))
    places = "; ".join(setting.label for setting in study.settings)
    seeds = "seed" if len(study.seeds) == 1 else "seeds"
    commit = git("rev-parse", "--short", "HEAD")
    yield (
        f"Study {study.name}: {show_count(len(study.runs), 'run')} of fedspa {versions} on {places} ({seeds} "
        f"{listed(study.seeds)}). Reported on {date.today()}" + (f" at commit {commit}." if commit else ".")
    )
    runs = study.runs
    differing = []
    for key in sorted(key for key in varied(runs) if all(key in run.settings for run in runs)):
        values = sorted({run.settings[key] for run in runs}, key=in_order)
        differing.append(f"{key}: {', '.join(map(written, values))}")
    yield f"The configs differ in {'; '.join(differing) or 'nothing'}."
    for setting in study.settings:
        yield from _small_tests(setting)


def _small_tests(setting: Setting) -> Iterator[str]:
    """A sentence on clients that were tested on fewer images than the config asks for, if there are any."""
    known = [tests for run in setting.runs if (tests := names.group("client_tests", run.summary))]
    small = [tests for tests in known if tests["fewer"]]
    if small:
        asked = " or ".join(f"{asked:,}" for asked in sorted({tests["asked"] for tests in small}))
        yield (
            f"{setting.label}: in {len(small)} of {len(known)} runs clients were tested on fewer images than the "
            f"{asked} asked for: at most {show_count(max(tests['fewer'] for tests in small), 'client')} in a run. The "
            f"smallest test set has {min(tests['smallest'] for tests in small):,} images. The lowest median of a run "
            f"is {min(tests['median'] for tests in small):,g}."
        )


def _link(run: Path, page: Path) -> str:
    """The path to a run from the page's folder; "" if nothing below the project's root holds both.

    A committed page must not have links to runs that are not committed.
    """
    together = Path(os.path.commonpath([run.resolve(), page.resolve()]))
    return "" if together in (root := project_root(), *root.parents) else os.path.relpath(run, page)


def _svg(picture: Picture) -> bytes:
    """A figure as SVG. Its bytes depend on the figure alone."""
    from matplotlib import rc_context

    file = BytesIO()
    with rc_context({"svg.hashsalt": picture.name}):
        picture.figure.savefig(
            file, format="svg", dpi=150, transparent=True, metadata={"Date": None, "Creator": None}
        )
    return file.getvalue()
