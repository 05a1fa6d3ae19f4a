"""The README's table of groups against conf/."""

from __future__ import annotations

import re

from doc_pages import ROOT


def test_the_table_has_every_group_and_option() -> None:
    section = (ROOT / "README.md").read_text().split("\n## Groups\n")[1].split("\n## ")[0]
    listed = {
        group: sorted(options.split(", "))
        for group, options in re.findall(r"^\| `([\w/]+)` \| ([^|]+) \|", section, re.MULTILINE)
    }
    there: dict[str, list[str]] = {}
    for file in sorted((ROOT / "conf").glob("*/**/*.yaml")):
        there.setdefault(str(file.parent.relative_to(ROOT / "conf")), []).append(file.stem)
    assert listed == {group: sorted(options) for group, options in there.items()}
