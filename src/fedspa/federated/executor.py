"""An executor runs the clients' jobs, in this process or in others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from fedspa.core.server import ServerState
from fedspa.federated.client_runner import ClientRunner
from fedspa.federated.jobs import Job


class Executor(Protocol):
    """Runs jobs with a client runner, all from the same state of the server."""

    def run(self, jobs: Sequence[Job], server: ServerState) -> Iterator[Any]:
        """The results of `ClientRunner.perform` for each job, in the order of the jobs."""

    def close(self) -> None:
        """Release the executor's processes and memory."""


AHEAD = 16
"""The largest number of results that wait in memory while an engine queues the work of other jobs."""


class InProcess:
    """Runs all jobs in this process: one after another, or several at a time if the engine has lanes."""

    def __init__(self, runner: ClientRunner) -> None:
        self._runner = runner

    def run(self, jobs: Sequence[Job], server: ServerState) -> Iterator[Any]:
        together = AHEAD if self._runner.setup.engine.lanes else 1
        for first in range(0, len(jobs), together):
            yield from self._runner.perform_all(jobs[first : first + together], server)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
