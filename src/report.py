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
from fedspa.report.options import parse
from fedspa.runs.interruption import command


@command
def main(arguments: list[str]) -> int:
    """Write the report; returns the exit code."""
    if not arguments or {"--help", "-h"} & set(arguments):
        print(__doc__)
        return 0 if arguments else 2
    try:
        options = parse(arguments)

        from fedspa.report.page import make_report, write_report
        from fedspa.report.runs import read_runs
        from fedspa.report.study import make_study

        study = make_study(options.name, read_runs(options.folders()))
        report = make_report(study, targets=options.targets, beside_paper=options.paper)
        try:
            page = write_report(report, study, options.out)
        except OSError as error:
            raise UserError(
                f"out={options.out} cannot be written ({error.strerror}): give another folder by out=<folder>."
            ) from error
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    for line in report.left_out:
        print(f"Left out: {line}")
    print(f"{report.facts[0]}\nThe report is {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
