"""Run the CPU benchmarks and write their tables into docs/performance.md: `python benchmarks/all.py`, or `make bench`.

Takes some minutes; the machine should have nothing else to do. Each table is written as soon as it is measured. Names
of benchmarks after the command measure only these; with `--dry` the tables are printed, not written.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch
from bench import table

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "performance.md"
PARTS = ("cpu_round", "round_profile", "sharing", "local_step", "mask_search", "overhead", "memory")


def machine() -> str:
    """The processor, the cores, and the versions that matter."""
    from fedspa.core.launch import usable_cores

    try:
        name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        name = None
    processor = name[1] if name else platform.processor() or platform.machine()
    return (
        f"{usable_cores()} cores of {processor} ({torch.backends.cpu.get_cpu_capability()}), {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def measured(part: str) -> str:
    """The table of one benchmark, run in a process of its own."""
    print(f"{part} ...", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, HERE / f"{part}.py"], stdout=subprocess.PIPE, text=True, check=True
    )
    return table([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")])


def filled(page: str, name: str, text: str) -> str:
    """The page with what stands between the marks of that name replaced."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
    before, rest = page.split(begin)
    return before + begin + text + "\n" + end + rest.split(end)[1]


def main() -> None:
    parts = [word for word in sys.argv[1:] if word != "--dry"] or PARTS
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"There is no benchmark {', '.join(sorted(unknown))}: they are {', '.join(PARTS)}.")
    if "--dry" in sys.argv:
        for part in parts:
            print(f"{part}\n{measured(part)}\n", flush=True)
        return
    PAGE.write_text(filled(PAGE.read_text(), "machine", machine() + "."))
    for part in parts:
        text = measured(part)
        PAGE.write_text(filled(PAGE.read_text(), part, text))


if __name__ == "__main__":
    main()
