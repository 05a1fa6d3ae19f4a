"""A report: what was found, its tables and its figures, as one HTML page and as the same in Markdown and LaTeX."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from fedspa.report import tables
from fedspa.report.density import density_table
from fedspa.report.figures import DRAWN, Picture
from fedspa.report.formats import Table, html_table, latex, markdown
from fedspa.report.paper import paper_tables
from fedspa.report.results import write_results
from fedspa.report.study import Setting, Study, varied_settings

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #3a3a3a; max-width: 1120px; margin: 3em auto; padding: 0 1.5em; }
h1, h2, h3 { color: #1f2f47; line-height: 1.2; } h2 { margin-top: 2.4em; } h3 { margin: 2em 0 .5em; }
p { max-width: 75ch; } code { font-size: 90%; }
.wide { overflow-x: auto; } img { max-width: 100%; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
thead { border-top: 1.5px solid; border-bottom: 1px solid; } tbody { border-bottom: 1.5px solid; }
th, td { padding: .25em .9em; white-space: nowrap; text-align: right; font-weight: normal; }
td b { font-weight: 700; } tbody th, thead th:first-child { text-align: left; padding-left: 0; }
thead th { white-space: normal; vertical-align: bottom; min-width: 4.5em; }
.groups th { text-align: center; border-bottom: 1px solid #d9d9d9; } .missing { color: #a8544c; font-style: italic; }
"""


@dataclass(frozen=True)
class Report:
    """Everything that a report says, whatever the format."""

    title: str
    facts: list[str]
    tables: list[Table]
    pictures: list[Picture]
    left_out: list[str]


def make_report(study: Study, *, targets: Sequence[float] = (), beside_paper: bool = False) -> Report:
    """Compute the tables and draw the figures. `targets`: accuracies in percent, instead of those of the runs."""
    printed = paper_tables(study, targets) if beside_paper else []
    facts = _facts(study)
    if beside_paper and not printed:
        facts.append(
            "No cell of this study is one of the paper\u2019s: those have its data set, network and partition, all "
            "training images and 100 clients."
        )
    density, times = density_table(study), tables.time_table(study)
    drawn = (draw(study, setting) for setting in study.settings for draw in DRAWN)
    return Report(
        title=f"Report on {study.name}",
        facts=facts,
        tables=[
            *tables.main_tables(study),
            *([density] if density else []),
            *tables.metric_tables(study),
            *printed,
            *tables.rounds_tables(study, targets),
            *tables.rival_tables(study),
            *([times] if times else []),
        ],
        pictures=[picture for picture in drawn if picture],
        left_out=[f"{where}: {why}." for where, why in study.left_out],
    )


def write_report(report: Report, study: Study, folder: Path, targets: Sequence[float] = ()) -> Path:
    """Write index.html, report.md, tables.tex, results.csv and figures/; returns the page's path."""
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    drawings = {}
    for picture in report.pictures:
        drawings[picture.name] = _svg(picture)
        (figures / f"{picture.name}.svg").write_bytes(drawings[picture.name])
        picture.figure.set_layout_engine("none")  # it is laid out now, which takes as long as drawing
        picture.figure.savefig(figures / f"{picture.name}.png", dpi=150, metadata={"Software": None})
    (folder / "report.md").write_text(markdown_report(report))
    (folder / "tables.tex").write_text(latex_tables(report))
    write_results(folder / "results.csv", study, targets)
    page = folder / "index.html"
    page.write_text(html_page(report, drawings))
    return page


def html_page(report: Report, drawings: dict[str, bytes]) -> str:
    """One page that needs nothing else. `drawings`: each picture's SVG by name."""
    parts = [
        f"<h1>{html.escape(report.title)}</h1>",
        *(f"<p>{html.escape(fact)}</p>" for fact in report.facts),
    ]
    if report.left_out:
        items = "".join(f"<li>{html.escape(line)}</li>" for line in report.left_out)
        parts.append(f"<p>Left out:</p><ul>{items}</ul>")
    parts.append("<h2>Tables</h2>")
    for table in report.tables:
        parts += [f"<h3>{html.escape(table.title)}</h3>", f'<div class="wide">{html_table(table)}</div>']
        parts.append(f"<p>{html.escape(table.caption)}</p>")
    parts.append("<h2>Figures</h2>")
    for picture in report.pictures:
        title, image = html.escape(picture.title), base64.b64encode(drawings[picture.name]).decode()
        parts += [f"<h3>{title}</h3>", f'<img alt="{title}" src="data:image/svg+xml;base64,{image}">']
        parts.append(f"<p>{html.escape(picture.caption)}</p>")
    head = f'<meta charset="utf-8"><title>{html.escape(report.title)}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def markdown_report(report: Report) -> str:
    """The same, with the figures as links to figures/."""
    parts = [f"# {report.title}", *report.facts]
    if report.left_out:
        parts += ["Left out:", "\n".join(f"- {line}" for line in report.left_out)]
    parts.append("## Tables")
    for table in report.tables:
        parts += [f"### {table.title}", markdown(table), table.caption]
    parts.append("## Figures")
    for picture in report.pictures:
        parts += [f"### {picture.title}", f"![{picture.title}](figures/{picture.name}.png)", picture.caption]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def latex_tables(report: Report) -> str:
    """The tables alone, to be \\input."""
    head = "% Needs \\usepackage{booktabs,graphicx}.\n\n"
    return head + "\n".join(latex(table) for table in report.tables)


def _facts(study: Study) -> list[str]:
    varied = varied_settings(study.all_runs)
    values = "; ".join(f"{key}: {', '.join(several)}" for key, several in varied.items())
    versions = ", ".join(sorted({str(run.summary.get("version", "unknown")) for run in study.all_runs}))
    places = "; ".join(setting.label for setting in study.settings)
    return [
        f"{len(study.all_runs)} runs of fedspa {versions} on {places} (seeds {', '.join(map(str, study.seeds))}).",
        f"What differs between the configs: {values or 'nothing'}.",
        *(fact for setting in study.settings if (fact := _small_tests(study, setting))),
    ]


def _small_tests(study: Study, setting: Setting) -> str:
    """A sentence on clients that were tested on fewer images than the config asks for; "" where there are none."""
    told = [tests for run in study.runs_of(setting) if (tests := run.summary.get("client_tests"))]
    small = [tests for tests in told if tests["fewer"]]
    if not small:
        return ""
    asked = " or ".join(f"{asked:,}" for asked in sorted({tests["asked"] for tests in small}))
    return (
        f"{setting.label}: in {len(small)} of {len(told)} runs clients were tested on fewer images than the {asked} "
        f"asked for, up to {max(tests['fewer'] for tests in small):,} clients a run; the smallest test set has "
        f"{min(tests['smallest'] for tests in small):,}, the median one {min(tests['median'] for tests in small):,g} "
        "or more."
    )


def _svg(picture: Picture) -> bytes:
    """The same figure gives the same bytes."""
    from matplotlib import rc_context

    file = BytesIO()
    with rc_context({"svg.hashsalt": picture.name}):
        picture.figure.savefig(file, format="svg", dpi=150, metadata={"Date": None, "Creator": None})
    return file.getvalue()
