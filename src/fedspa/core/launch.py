"""The launch of this process: alone, or as one of several that torchrun or SLURM started for one run.

This module does not import torch, because the command line needs it before anything else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedspa.core.errors import UserError

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment


@dataclass(frozen=True)
class Launch:
    """The place of this process, a rank, among the processes of a run."""

    launcher: str | None = None
    """torchrun or slurm; None for a process that is alone."""
    rank: int = 0
    size: int = 1
    """The number of ranks on all machines."""
    local_size: int = 1
    """The number of ranks on this machine. It must be the same on each machine."""
    cores: int | None = None
    """The CPU cores that the launcher gave to this rank; None if it does not say."""

    @property
    def main(self) -> bool:
        """True for the one rank that writes files, tracks the run and prints."""
        return self.rank == 0

    @property
    def machines(self) -> int:
        return self.size // self.local_size

    def share_of(self, cores: int) -> int:
        """The number of cores for this rank: the launcher's number, or an equal share of the machine's `cores`."""
        return max(self.cores or cores // self.local_size, 1)


ALONE = Launch()
"""A run in one process."""


def launched(environment: Mapping[str, str] | None = None) -> Launch:
    """The launch of this process, from the environment variables that torchrun or srun set.

    A SLURM job that is not started by srun is one process, for any number of reserved tasks.
    Raises `UserError` for a launch with different numbers of ranks on its machines.
    """
    given = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" in given:
        found = Launch(
            "torchrun", int(given["RANK"]), int(given["WORLD_SIZE"]), int(given["LOCAL_WORLD_SIZE"])
        )
    elif int(given.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        size, cores = int(given["SLURM_STEP_NUM_TASKS"]), given.get("SLURM_CPUS_PER_TASK")
        local_size = given.get("SLURM_NTASKS_PER_NODE")
        if local_size is None:
            raise UserError(
                f"srun starts {size} tasks, but not equally many on each node: add --ntasks-per-node."
            )
        found = Launch("slurm", int(given["SLURM_PROCID"]), size, int(local_size), int(cores) if cores else 1)
    else:
        return ALONE
    if found.size % found.local_size:
        raise UserError(
            f"{found.launcher} started {found.size} processes, {found.local_size} of them on this machine: "
            "every machine of a run must have equally many."
        )
    return found if found.size > 1 else ALONE


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment_of(launch: Launch) -> ClusterEnvironment:
    """Lightning's environment object for a launcher."""
    from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    return SLURMEnvironment(auto_requeue=False) if launch.launcher == "slurm" else TorchElasticEnvironment()
