"""Prove on one GPU that fedspa computes right values, is fast enough, and reaches known accuracies.

    python benchmarks/gpu_check.py --cifar10 <folder>        # all parts: about seven minutes on one H100
    python benchmarks/gpu_check.py --parts right fast
    python benchmarks/gpu_check.py --tiny --cifar10 <folder> # the same code on a CPU; its figures mean nothing

Each check runs in its own process and ends at its deadline, so none can spoil another. Its result is a line of JSON.
The exit code is not 0 if a value is wrong, an engine fell back to another one, a goal is missed by more than the line
says, or a check could not be done. Without --cifar10 the part `accurate` counts as not passed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gpu_accurate
import gpu_fast
import gpu_right
from gpu_base import Check, Options, Wrong

from fedspa.config.schema import register

CHECKS: list[Check] = [*gpu_right.CHECKS, *gpu_fast.CHECKS, *gpu_accurate.CHECKS]
PARTS = ("right", "fast", "accurate")
_CONTEXT = get_context("fork")  # the imports take seconds; nothing here may touch the GPU before the fork


def outcome(check: Check, options: Options) -> dict[str, Any]:
    """Run a check in a process; returns its line."""
    begin = time.perf_counter()
    deadline = check.deadline * (10 if options.tiny else 1)
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_answer, args=(check, options, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(deadline):
            found = receiver.recv()
        else:
            found = {"passed": False, "reason": f"no result within {deadline:g} s"}
    except EOFError:
        process.join()
        found = {"passed": False, "reason": f"its process ended with exit code {process.exitcode}"}
    process.kill()
    process.join()
    seconds = round(time.perf_counter() - begin, 1)
    return {"part": check.part, "check": check.name, "seconds": seconds, **found}


def _answer(check: Check, options: Options, sender: Connection) -> None:
    try:
        found = {"passed": True, **check.run(options)}
    except Wrong as error:
        found = {"passed": False, "reason": str(error), **error.facts}
    except Exception as error:  # any error makes this one check fail
        found = {"passed": False, "reason": f"{type(error).__name__}: {error}"}
    sender.send(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cifar10", type=Path, help="a folder with train.parquet and test.parquet")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU, to try the checks")
    given = parser.parse_args()
    register()
    options, failed = Options(given.tiny, given.cifar10), 0
    for check in CHECKS:
        if check.part in given.parts:
            line = outcome(check, options)
            failed += not line["passed"]
            print(json.dumps(line), flush=True)
    if failed:
        sys.exit(f"{failed} checks did not pass.")


if __name__ == "__main__":
    main()
