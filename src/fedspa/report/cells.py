"""The words of cells, headings and captions, and cells over the seeds of a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fedspa.core.records import KINDS
from fedspa.report.numbers import Seeds
from fedspa.report.runs import Run
from fedspa.report.study import Row, Setting, Study
from fedspa.report.table import NO_RUN, Cell

CURVES = KINDS[:-1]
"""The kinds of model that have an accuracy in each round."""


def over(study: Study, setting: Setting, cell: Callable[[list[Run]], Cell]) -> Callable[[Row, str], Cell]:
    """A cell of a row's runs on that data."""

    def of(row: Row, _: str) -> Cell:
        runs = study.runs(row, setting)
        return cell(runs) if runs else Cell(NO_RUN)

    return of


def lines_of(rows: Sequence[Row]) -> list[tuple[str, Row, str]]:
    return [(row.label, row, "") for row in rows]


def named(study: Study, setting: Setting) -> str:
    """The main metric and its unit, as a sentence begins: `Accuracy in %`."""
    metric = study.main_metric(setting)
    return f"{metric[0].upper()}{metric[1:]}" + " in %" * study.runs_of(setting)[0].in_percent


def traffic_unit(largest: float) -> tuple[float, str]:
    """Bytes in a unit, and its name: the paper's GB (1e9) for large traffic."""
    return (1e9, "GB") if largest >= 1e9 else (1e6, "MB") if largest >= 1e6 else (1e3, "kB")


def flops_unit(largest: float) -> tuple[float, str]:
    """FLOPs in a unit, and its name: the paper's 1e14 for large ones, else a power of 1000."""
    exponent = 14 if largest >= 1e14 else 3 * int(math.log10(max(largest, 1)) // 3)
    return 10.0**exponent, f"1e{exponent}"


def seeds_text(study: Study) -> str:
    """A sentence about the seeds and the mean that make a cell."""
    if len(study.seeds) == 1:
        return f"one seed, {study.seeds[0]}"
    return f"mean \u00b1 standard deviation (ddof = 0) over the seeds {', '.join(map(str, study.seeds))}"


def plus_minus(seeds: Seeds, digits: int) -> str:
    """`83.4 ± 0.1`; of one seed `83.4`."""
    spread = f" \u00b1 {seeds.std:.{digits}f}" if len(seeds.values) > 1 else ""
    return f"{seeds.mean:.{digits}f}{spread}"


def listed(items: Sequence[object]) -> str:
    """`a, b and c`."""
    texts = [str(item) for item in items]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def slug(text: str) -> str:
    """A text as a file's name or an anchor."""
    return "".join(char if char.isalnum() else "-" for char in text.lower()).strip("-")


def fewer_seeds(study: Study, runs: Sequence[Run]) -> str:
    """` [2 seeds]` where a cell has fewer seeds than the study."""
    return f" [{len(runs)} seed{'s' * (len(runs) > 1)}]" if len(runs) < len(study.seeds) else ""
