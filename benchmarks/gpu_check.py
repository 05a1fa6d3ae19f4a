"""Prove on one GPU that fedspa computes right values, is fast enough, and reaches known accuracies.

    python benchmarks/gpu_check.py --cifar10 <folder>        # all parts, for at most seven minutes
    python benchmarks/gpu_check.py --parts right fast
    python benchmarks/gpu_check.py --tiny --cifar10 <folder> # the same code on a CPU; its figures mean nothing

Each check runs in its own process and ends at its deadline, so none can spoil another. Its result is a line of JSON.
The checks together end after --seconds. Nobody has run them on a GPU, so nobody has measured whether they all fit:
run one part per call if time is short. The exit code is not 0 if a value is wrong, an engine fell back to another
one, a goal is missed by more than the line says, or a check could not be done or was not reached. Without --cifar10
the part `accurate` counts as not passed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
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
NOT_REACHED = "not reached: the earlier checks took all the time; use --parts or more --seconds"
SECONDS = 420.0
"""The time for all checks together, unless --seconds sets another one."""
_CONTEXT = get_context("fork")  # the imports take seconds; nothing here may touch the GPU before the fork


def outcome(check: Check, options: Options, left: float = math.inf) -> dict[str, Any]:
    """Run a check in a process; returns its line. `left`: the seconds that remain for all checks."""
    if left <= 0:
        found = {"passed": False, "reason": NOT_REACHED}
        return {"part": check.part, "check": check.name, "seconds": 0, **found}
    begin = time.perf_counter()
    deadline = min(left, check.deadline * (10 if options.tiny else 1))
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_answer, args=(check, options, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(deadline):
            found = receiver.recv()
        else:
            why = ", when the time for all checks was over" if deadline == left else ""
            found = {"passed": False, "reason": f"no result within {deadline:.3g} s{why}"}
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
        found = {"passed": False, "reason": "; from ".join(_history(error))}
    sender.send(found)


def _history(error: BaseException | None) -> Iterator[str]:
    """An error and those it came from: the last one of a failed capture does not say what went wrong."""
    while error is not None:
        yield f"{type(error).__name__}: {error}"[:500]
        error = error.__cause__ or error.__context__


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cifar10", type=Path, help="a folder with train.parquet and test.parquet")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU, to try the checks")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"the time for all checks together; {SECONDS:g} by default, and no limit with --tiny",
    )
    given = parser.parse_args()
    register()
    seconds = given.seconds or (math.inf if given.tiny else SECONDS)
    options, end = Options(given.tiny, given.cifar10), time.perf_counter() + seconds
    lines = []
    for check in CHECKS:
        if check.part in given.parts:
            lines.append(outcome(check, options, end - time.perf_counter()))
            print(json.dumps(lines[-1]), flush=True)
    failed = [line for line in lines if not line["passed"]]
    if failed:
        unreached = sum(line["reason"] == NOT_REACHED for line in failed)
        sys.exit(f"{len(failed)} of {len(lines)} checks did not pass; {unreached} of them were not reached.")


if __name__ == "__main__":
    main()
