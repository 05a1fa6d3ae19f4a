"""The list of faults names the tests that prove what happens; those tests exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
LIST = (TESTS / "RELIABILITY.md").read_text()


def named(text: str) -> set[tuple[str, str]]:
    """Each test that a text names, with its file; `::test_x` is one of the file before."""
    found, file = set(), ""
    for before, test in re.findall(r"`(test_\w+\.py)?(?:::(test_\w+))?`", text):
        file = before or file
        if file:
            found.add((file, test))
    return found


def test_every_row_names_a_test() -> None:
    rows = re.findall(r"^\| (?!-|fault \||kind in).*", LIST, re.MULTILINE)
    assert len(rows) > 60
    assert [row for row in rows if not named(row.rpartition(" | ")[2])] == []


def test_every_test_that_is_named_exists() -> None:
    missing = [
        (file, test)
        for file, test in sorted(named(LIST))
        if not (TESTS / file).is_file() or (test and f"\ndef {test}(" not in (TESTS / file).read_text())
    ]
    assert missing == []
