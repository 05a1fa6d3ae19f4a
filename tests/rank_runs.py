"""Whole runs in two ranks, forks of the test process that find each other as torchrun's would."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kill_points import instrumented, silence

from fedspa.config.plan import Plan
from fedspa.core.errors import UserError
from fedspa.runs.experiment import run
from fedspa.runs.interruption import Preempted

PATIENCE = 60
"""Seconds after which ranks that have not ended are taken to wait for ever."""


class End(NamedTuple):
    """How a rank ended."""

    code: int
    """As `Popen.returncode` has it, and as the command line would exit."""
    reason: str
    """What was raised; empty where nothing was."""


def run_in_ranks(
    plan: Plan,
    folder: Path,
    act: Callable[[], None] = lambda: None,
    *,
    rank: int | None = 0,
    point: str = "",
    number: int = 1,
    size: int = 2,
) -> list[End]:
    """Run in `size` ranks; at a point of kill_points.py `rank` (None: each) does `act` when it comes to it for the
    n-th time.

    Returns the ends by rank. Raises `AssertionError` where the ranks do not end.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [os.pipe() for _ in range(size)]
    children = []
    for own in range(size):
        child = os.fork()
        if child == 0:
            place = {"RANK": own, "LOCAL_RANK": own, "GROUP_RANK": 0}
            place |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
            place |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
            os.environ |= {name: str(value) for name, value in place.items()}
            _live(plan, folder, act if rank in (own, None) else lambda: None, point, number, pipes[own][1])
        children.append(child)
    return [_end(child, pipe) for child, pipe in zip(children, pipes, strict=True)]


def _live(plan: Plan, folder: Path, act: Callable[[], None], point: str, number: int, pipe: int) -> None:
    end = End(1, "")
    with suppress(BaseException):
        silence()
        left = {point: number}

        def passes(name: str) -> bool:
            left[name] = left.get(name, 0) - 1
            return left[name] == 0

        try:
            with instrumented(passes, act):
                run(plan, folder)
            end = End(0, "")
        except Preempted as stop:
            end = End(75, str(stop))
        except KeyboardInterrupt as stop:
            end = End(130, str(stop))
        except UserError as error:
            end = End(2, str(error))
        except Exception as error:
            end = End(1, f"{type(error).__name__}: {error}")
        os.write(pipe, json.dumps(end.reason).encode())
    os._exit(end.code)


def _end(child: int, pipe: tuple[int, int]) -> End:
    deadline = time.monotonic() + PATIENCE
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise AssertionError("a rank waits for ever")
        time.sleep(0.01)
    os.close(pipe[1])
    with os.fdopen(pipe[0], "rb") as told:
        reason = told.read().decode()
    return End(os.waitstatus_to_exitcode(ended[1]), json.loads(reason) if reason else "")
