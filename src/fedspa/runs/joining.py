"""How the ranks of a run find each other, before one of them does anything that could fail on it alone."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from fedspa.core.errors import UserError, brief
from fedspa.core.launch import Launch, environment_of
from fedspa.runs.interruption import Interruptions
from fedspa.runs.rank_group import RankGroup

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment

log = logging.getLogger(__name__)

PATIENCE_S = 600.0
"""How long a rank waits for those that have not come yet: on a busy disk imports alone take minutes."""
TOGETHER = timedelta(days=2)
"""How long ranks that have met wait for one that is slow; one that died is noticed at once."""
_TRY_S, _LOOK_S = 5.0, 0.05
"""Between these moments a signal is heard: how long a rank tries to reach the first, and how often it looks round."""


@contextmanager
def joined(launch: Launch) -> Iterator[RankGroup]:
    """The processes of a run as a group that listens to signals; a process that is alone is a group of one.

    Raises `UserError` on every rank that came where another does not come within `PATIENCE_S`.
    """
    with Interruptions() as interruptions:
        group = RankGroup(launch.rank, launch.size, interruptions)
        if launch.size > 1:
            with group.droppable():
                _meet(launch)
        try:
            yield group
        finally:
            group.close()


def _meet(launch: Launch) -> None:
    """Wait until all ranks are there, then join them in a process group for the CPU.

    The group's own way to wait hears no signal and cannot tell a rank that is missing from one that is slow.
    """
    environment, deadline = environment_of(launch), time.monotonic() + PATIENCE_S
    place = f"{environment.main_address}:{environment.main_port}"
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    present = [f"fedspa/{restart}/{rank}" for rank in range(launch.size)]
    try:
        store = _reach(launch, environment, deadline)
        store.set(present[launch.rank], "here")
        while not store.check(present):
            if time.monotonic() > deadline:
                missing = [str(rank) for rank, key in enumerate(present) if not store.check([key])]
                raise _alone(launch, f"rank {', '.join(missing)} of {launch.size} did not come")
            time.sleep(_LOOK_S)
    except RuntimeError as error:  # of the connection
        raise _alone(launch, f"rank 0 is not to be reached at {place}: {brief(error)}") from error
    torch.distributed.init_process_group(
        "gloo", store=store, rank=launch.rank, world_size=launch.size, timeout=TOGETHER
    )


def _reach(launch: Launch, environment: ClusterEnvironment, deadline: float) -> torch.distributed.Store:
    """What all ranks can write to: a server in the first, or one that torchrun has."""
    serves = launch.main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while True:
        try:
            return torch.distributed.TCPStore(
                environment.main_address,
                environment.main_port,
                launch.size,
                serves,
                timeout=timedelta(seconds=_TRY_S),
                wait_for_workers=False,
            )
        except RuntimeError:
            if serves or time.monotonic() > deadline:
                raise


def _alone(launch: Launch, why: str) -> UserError:
    """Each rank says it itself: the first, which speaks for all, may be the one that is missing."""
    reason = (
        f"The {launch.size} ranks of this run did not find each other within {PATIENCE_S / 60:g} minutes "
        f"({why}): what that rank said, or its machine's log, tells why."
    )
    if not launch.main:
        log.error("Rank %d: %s", launch.rank, reason)
    return UserError(reason)
