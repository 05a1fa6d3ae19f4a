"""Report on finished runs: tables, figures and one page that holds them.

    python src/report.py sweep=<name>             the jobs under outputs/sweeps/<name>
    python src/report.py runs=<folder>            all runs under a folder
    python src/report.py runs="tags.dataset = 'digits'"   those that a filter of MLflow finds

Further options:
    out=<folder>      where to write (outputs/reports/<name>)
    paper=true        the paper's printed values beside ours, with the difference
    targets=70,80     rounds to these accuracies in percent (those of the runs' configs)
"""

from __future__ import annotations

import sys

from fedspa.core.errors import UserError
from fedspa.core.options import read_options
from fedspa.report.options import Options
from fedspa.runs.commands import main


def report(words: list[str]) -> None:
    """Write the report."""
    options = read_options(Options, words)

    from fedspa.report.page import make_report, write_report
    from fedspa.report.runs import read_runs
    from fedspa.report.study import make_study

    study = make_study(options.name, read_runs(options.folders()))
    made = make_report(study, targets=options.targets, beside_paper=options.paper)
    try:
        page = write_report(made, study, options.folder)
    except OSError as error:
        raise UserError(
            f"out={options.folder} cannot be written ({error.strerror}): give another folder by out=<folder>."
        ) from error
    for line in made.left_out:
        print(f"Left out: {line}")
    print(f"{made.facts[0]}\nThe report is {page}")


if __name__ == "__main__":
    sys.exit(main(report, __doc__))
