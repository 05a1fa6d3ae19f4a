"""How a tracking store is named and opened: a server, or a database beside the project."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from fedspa.core.errors import UserError, brief
from fedspa.core.paths import project_root
from fedspa.tracking.local_store import (
    artifacts_of,
    correct_places,
    is_missing,
    one_process_at_a_time,
    store_file,
)
from fedspa.tracking.mlflow_page import EXPERIMENT

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment

SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # else a page of lines on the new tables
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the run says itself where it is to be seen
    # A server that does not answer is told of within 10 s. MLflow's own defaults are 120 s and 7 retries, which
    # make minutes; trying again is done in `mlflow_delivery`, where nobody waits.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}
"""MLflow's own settings, where the user's environment does not say otherwise."""
USUAL_SERVER = "http://127.0.0.1:5000"
"""Where `mlflow ui` listens unless told otherwise."""
TRAINING = {"workflowType": "machine_learning"}
"""In an address: a browser that has not been to MLflow yet is shown the pages of language models otherwise."""
OTHERWISE = "mend it, name another with loggers.mlflow.tracking_uri=..., or run with logger=csv"
"""What a run can do about a store that cannot be used."""


def store_uri() -> str:
    """The tracking store unless a run's config names another."""
    return os.environ.get("MLFLOW_TRACKING_URI") or _default_uri()


def noted(uri: str) -> str:
    """How a run notes which store has it: the one beside the project without an address, since both may move."""
    return "" if uri == _default_uri() else uri


def from_note(note: str) -> str:
    """The store of such a note; where its file is gone, the one that is used now."""
    uri = note or _default_uri()
    return store_uri() if is_missing(uri) else uri


def open_client(uri: str) -> MlflowClient:
    """A client of the store; it asks a server nothing yet. Raises `UserError` as `correct_places` does."""
    _set_up()
    from mlflow import MlflowClient

    with one_process_at_a_time(uri):
        correct_places(uri)
        return MlflowClient(tracking_uri=uri)


def open_store(uri: str, experiment: str) -> tuple[MlflowClient, str]:
    """A client of the store and the experiment's id; both are made where they do not exist yet.

    Raises `UserError` if the store cannot be had.
    """
    with store_needed(uri):
        client = open_client(uri)
        with one_process_at_a_time(uri):
            found = client.get_experiment_by_name(experiment) or _created(client, uri, experiment)
            if found.lifecycle_stage != "active":
                raise UserError(
                    f"loggers.mlflow.experiment={experiment} has been deleted in the tracking store {uri}: restore it "
                    f"(MLFLOW_TRACKING_URI={uri} mlflow experiments restore --experiment-id {found.experiment_id}), or "
                    "name another one, as in loggers.mlflow.experiment=more."
                )
            if missing := EXPERIMENT.keys() - found.tags.keys():
                _describe(client, found.experiment_id, {key: EXPERIMENT[key] for key in missing})
            return client, found.experiment_id


def _created(client: MlflowClient, uri: str, experiment: str) -> Experiment:
    """A new experiment, or the one that another run has made in this moment."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_experiment(experiment, artifact_location=artifact_location(uri), tags=EXPERIMENT)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    found = client.get_experiment_by_name(experiment)
    if found is None:
        raise MlflowException(f"the experiment {experiment} is neither there nor can it be made")
    return found


def _describe(client: MlflowClient, experiment_id: str, tags: Mapping[str, str]) -> None:
    """Tags of an experiment that is there already; on a shared server only its owner may set them."""
    from mlflow.exceptions import MlflowException

    for key, value in tags.items():
        try:
            client.set_experiment_tag(experiment_id, key, value)
        except MlflowException as error:
            if error.get_http_status_code() not in (401, 403):
                raise
            return


def _set_up() -> None:
    """MLflow reads some of its settings when it is imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


@contextmanager
def store_needed(uri: str, advice: str = OTHERWISE) -> Iterator[None]:
    """What happens inside cannot do without the store: its errors are told as one sentence, a `UserError`."""
    _set_up()
    try:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        errors: tuple[type[Exception], ...] = (MlflowException, SQLAlchemyError, OSError)
    except ImportError:
        raise UserError("loggers.mlflow needs MLflow: pip install mlflow, or run with logger=csv.") from None
    try:
        yield
    except errors as error:
        raise UserError(
            f"loggers.mlflow: the tracking store {uri} cannot be used ({root_cause(error)}): {advice}."
        ) from error


def root_cause(error: BaseException) -> str:
    """What lies below an error of MLflow's, in a line: its own wraps three others in a page of text."""
    while deeper := error.__cause__ or error.__context__:
        error = deeper
    return brief(error)


def artifact_location(uri: str) -> str | None:
    """A server decides itself; with a database MLflow would take the current directory, whatever it is."""
    if "://" in uri and uri.split("://")[0] in ("http", "https", "databricks"):
        return None
    return artifacts_of(store_file(uri) or project_root() / "mlflow.db")


def where_to_look(uri: str, page: str) -> str:
    """How one comes to see a page of a store: `run_page` or `jobs_page`."""
    if uri.startswith("http"):
        return f"{uri.rstrip('/')}/{page}"
    server = (
        f"`mlflow ui` in {project_root()}"
        if uri == _default_uri()
        else f"`mlflow ui --backend-store-uri {uri}`"
    )
    return f"run {server}, then open {USUAL_SERVER}/{page}"


def run_page(experiment_id: str, run_id: str) -> str:
    """The page of a run, as the end of an address."""
    return f"#/experiments/{experiment_id}/runs/{run_id}?{urlencode(TRAINING)}"


def jobs_page(experiment_id: str, parent_id: str) -> str:
    """The charts of the runs nested below another, as the end of an address.

    Sorted by name, since MLflow hides nested runs below their parent in any table that is sorted by time.
    """
    view = {
        "searchFilter": f'tags.mlflow.parentRunId="{parent_id}"',
        "orderByKey": "tags.`mlflow.runName`",
        "orderByAsc": "true",
        "compareRunsMode": "CHART",
    }
    return f"#/experiments/{experiment_id}/runs?{urlencode(TRAINING | view, quote_via=quote)}"


def _default_uri() -> str:
    return f"sqlite:///{project_root() / 'mlflow.db'}"
