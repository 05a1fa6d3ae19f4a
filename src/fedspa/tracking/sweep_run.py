"""A sweep in MLflow: a run, under which the sweep's jobs are nested."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from fedspa.core import names
from fedspa.core.records import ACCURACY, KINDS
from fedspa.core.roles import SINGLE
from fedspa.tracking.mlflow_tracker import MLflowTracker
from fedspa.tracking.page import NOTE, NOTE_LENGTH, markdown_table, picture, source_tags
from fedspa.tracking.store import TRAINING, open_store, root_cause, run_page, store_needed, where_to_look

if TYPE_CHECKING:
    import pandas as pd
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

SWEEP = "sweep"
"""The tag by which a sweep's run is found again when the sweep goes on another day."""
VIEW = "mlflow.sharedViewState."
"""The prefix of the experiment's tag that keeps a view of its table for those who open an address."""
FINETUNED = names.final(names.score(ACCURACY, "finetuned"))
COLUMNS = (*(names.score(ACCURACY, kind) for kind in KINDS if kind != "finetuned"), FINETUNED)
"""The columns of the table of jobs: the last scores. A heading shows about 17 letters."""


@dataclass
class Parent:
    """A sweep's run: its identity, for the jobs, and the results that it shows at the end."""

    run_id: str = ""
    """Empty where nothing goes to MLflow."""
    logger: str = ""
    """The dotted name of the jobs' tracker."""
    failed: int = 0
    outcomes: dict[str, str] = field(default_factory=dict)
    """The outcome of each job by its name."""
    tables: Sequence[pd.DataFrame] = ()
    """The final scores of the study."""
    picture: Path | None = None
    """The file with a picture of these scores."""

    def note(self) -> str:
        """The description of the sweep's run: scores, picture, and as many of the jobs' outcomes as MLflow takes."""
        tables = ([[table.columns.name, *table], *table.itertuples()] for table in self.tables)
        parts = [markdown_table(table, NOTE_LENGTH // 3) for table in tables]
        if self.picture:
            parts.append(picture(self.run_id, self.picture.name))
        jobs = [["job", "outcome"], *([f"`{name}`", words[:200]] for name, words in self.outcomes.items())]
        return "\n\n".join([*parts, markdown_table(jobs, NOTE_LENGTH - sum(map(len, parts)))])

    def overrides(self, title: str) -> list[str]:
        """Nests a job below the sweep's run, under its title there."""
        if not self.run_id:
            return []
        name = [] if title == SINGLE else [f"++{self.logger}.run_name='{title}'"]
        return [f"++{self.logger}.parent_run_id={self.run_id}", *name]


@contextmanager
def nested_in(sweep: str, loggers: Mapping[str, Any]) -> Iterator[Parent]:
    """The sweep's run while its jobs run; afterwards it is FINISHED, FAILED if a job was, or KILLED by Ctrl-C.

    The store is made here, before jobs that run side by side could all try to. Raises `UserError` if it cannot be used.
    """
    found = [(key, logger) for key, logger in loggers.items() if isinstance(logger, MLflowTracker)]
    if not found:
        yield Parent()
        return
    key, tracker = found[0]
    with store_needed(tracker.uri):
        client, experiment = open_store(tracker.uri, tracker.experiment)
        if earlier := client.search_runs([experiment], f"tags.{SWEEP} = '{sweep}'", max_results=1):
            run_id = earlier[0].info.run_id
            client.update_run(run_id, status="RUNNING")
        else:
            sources = {SWEEP: sweep, **source_tags()}
            run_id = client.create_run(experiment, run_name=sweep, tags=sources).info.run_id
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
            if parent.picture:
                client.log_artifact(run_id, parent.picture)
            if parent.outcomes:
                client.set_tag(run_id, NOTE, parent.note())
            client.set_terminated(run_id, status)
            page = _jobs_page(client, experiment, run_id)
        except Exception as error:  # the jobs are done, each in its folder: the store cannot change that
            log.warning(
                "loggers.%s: the run of sweep=%s stays open in MLflow (%s): the same command again closes it.",
                key,
                sweep,
                root_cause(error),
            )
        else:
            print(f"\nAll runs of {sweep} in MLflow: {where_to_look(tracker.uri, page)}")


def _jobs_page(client: MlflowClient, experiment: str, run_id: str) -> str:
    """The table of a sweep's jobs, with their last accuracies as its columns, as the end of an address.

    It is sorted by name, for MLflow hides nested runs below their parent in a table that is sorted by time. The view
    is kept in a tag of the experiment, as MLflow's own button Share does.
    """
    view = {
        "searchFilter": f'tags.mlflow.parentRunId="{run_id}"',
        "orderByKey": "tags.`mlflow.runName`",
        "orderByAsc": True,
        "selectedColumns": [f"metrics.`{column}`" for column in COLUMNS],
    }
    try:
        client.set_experiment_tag(experiment, VIEW + run_id, json.dumps(view))
    except Exception:  # on a shared server only the owner may set tags
        return run_page(experiment, run_id)
    return f"#/experiments/{experiment}/runs?{urlencode({**TRAINING, 'viewStateShareKey': run_id})}"
