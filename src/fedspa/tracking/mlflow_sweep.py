"""A sweep in MLflow: a run of its own, under which its jobs are nested."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fedspa.core.roles import SINGLE
from fedspa.tracking.mlflow_connection import jobs_page, root_cause, store_needed, where_to_look
from fedspa.tracking.mlflow_page import NOTE, source_tags, sweep_note
from fedspa.tracking.mlflow_store import MLflowTracker

log = logging.getLogger(__name__)

SWEEP = "sweep"
"""The tag by which a sweep's run is found again when the sweep goes on another day."""


@dataclass
class Parent:
    """What a sweep's jobs need to know of its run, and what the run is to know in the end."""

    run_id: str = ""
    """Empty where nothing goes to MLflow."""
    logger: str = ""
    """The dotted name of the jobs' tracker."""
    failed: int = 0
    outcomes: dict[str, str] = field(default_factory=dict)
    """What became of each job, for the description of the sweep's run."""

    def overrides(self, job: str) -> list[str]:
        """Nests a job below the sweep's run, under its own name there."""
        if not self.run_id:
            return []
        name = [] if job == SINGLE else [f"++{self.logger}.run_name='{job}'"]
        return [f"++{self.logger}.parent_run_id={self.run_id}", *name]


@contextmanager
def nested_in(sweep: str, loggers: Mapping[str, Any]) -> Iterator[Parent]:
    """The sweep's run while its jobs run; afterwards it is FINISHED, FAILED if a job was, or KILLED by Ctrl-C.

    The store is made here, before jobs that run side by side could all try to. Raises `UserError` if it cannot
    be had.
    """
    found = next(
        ((key, logger) for key, logger in loggers.items() if isinstance(logger, MLflowTracker)), None
    )
    if found is None:
        yield Parent()
        return
    key, tracker = found
    client, experiment = tracker.open_store()
    with store_needed(tracker.uri):
        if earlier := client.search_runs([experiment], f"tags.{SWEEP} = '{sweep}'", max_results=1):
            run_id = earlier[0].info.run_id
            client.update_run(run_id, status="RUNNING")
        else:
            run_id = client.create_run(
                experiment, run_name=sweep, tags={SWEEP: sweep} | source_tags()
            ).info.run_id
    parent = Parent(run_id, f"loggers.{key}")
    status = "FAILED"
    try:
        yield parent
        status = "FAILED" if parent.failed else "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        try:
            if parent.outcomes:
                client.set_tag(run_id, NOTE, sweep_note(parent.outcomes))
            client.set_terminated(run_id, status)
        except Exception as error:  # the jobs are done, each in its folder: the store cannot change that
            log.warning(
                "loggers.%s: the run of sweep=%s stays open in MLflow (%s): the same command again closes it.",
                key,
                sweep,
                root_cause(error),
            )
        else:
            print(f"In MLflow: {where_to_look(tracker.uri, jobs_page(experiment, run_id))}")
