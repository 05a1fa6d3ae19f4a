"""The table of faults names tests; they exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_test_that_the_table_names_exists():
    text = (TESTS.parent / "docs/reliability.md").read_text()
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", text)
    assert len(named) > 10
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (TESTS / file).is_file() or f"def {test}(" not in (TESTS / file).read_text()
    ]
    assert missing == []


def test_every_row_of_the_tables_of_faults_names_a_test():
    tables = (TESTS.parent / "docs/reliability.md").read_text().split("\n\n")
    rows = [
        line for table in tables if "| test |" in table.splitlines()[0] for line in table.splitlines()[2:]
    ]
    assert len(rows) > 10 and [row for row in rows if not re.search(r"test_\w+\.py", row)] == []
