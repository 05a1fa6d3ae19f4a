"""An executor has the clients' jobs done: in this process, or elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from fedspa.core.server import ServerState
from fedspa.federated.client_runner import ClientRunner
from fedspa.federated.jobs import Job


class Executor(Protocol):
    """Has a runner do jobs, all from the same state of the server."""

    def run(self, jobs: Sequence[Job], server: ServerState) -> Iterator[Any]:
        """What `ClientRunner.perform` gives for each job, in their order, whatever the order in which they end."""

    def close(self) -> None:
        """Give back what the executor holds."""


class InProcess:
    """One job after another, in this process."""

    def __init__(self, runner: ClientRunner) -> None:
        self._runner = runner

    def run(self, jobs: Sequence[Job], server: ServerState) -> Iterator[Any]:
        for job in jobs:
            yield self._runner.perform(job, server)

    def close(self) -> None:
        """Nothing is held."""
