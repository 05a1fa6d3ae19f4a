"""The tables of faults name the tests that prove them; those tests exist, and run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs/reliability.md").read_text()


def named(text: str) -> list[tuple[str, str]]:
    """Each test that a text names, with its file; `::test_x` is one of the file before."""
    found, file = [], ""
    for before, test in re.findall(r"`(test_\w+\.py)?::(test_\w+)`", text):
        file = before or file
        found.append((file, test))
    return found


def test_short_names_mean_the_file_before():
    assert named("`test_a.py::test_b`, `::test_c`; `test_d.py::test_e`") == [
        ("test_a.py", "test_b"),
        ("test_a.py", "test_c"),
        ("test_d.py", "test_e"),
    ]


@pytest.mark.parametrize(("file", "test"), sorted(set(named(PAGE))))
def test_every_test_that_the_page_names_exists(file: str, test: str):
    assert (TESTS / file).is_file() and f"\ndef {test}(" in (TESTS / file).read_text()


def test_every_row_of_the_tables_of_faults_names_a_test():
    tables = [table.splitlines() for table in PAGE.split("\n\n")]
    rows = [row for table in tables if "| test |" in table[0] for row in table[2:]]
    files = {path.name for path in TESTS.glob("test_*.py")}
    assert len(rows) > 40
    for row in rows:
        where = row.strip(" |").rpartition(" | ")[2]
        assert named(where) or set(re.findall(r"`(test_\w+\.py)`", where)) & files, row
