"""The tracking store of MLflow: a server, or an SQLite file beside the project, whose artifacts lie beside it.

MLflow writes absolute places of artifacts into an SQLite store. After a move they name a folder that is gone. They are
corrected whenever the store is opened, so that a project may move with its store.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from fedspa.core.errors import UserError, brief
from fedspa.core.paths import project_root

if TYPE_CHECKING:
    from mlflow import MlflowClient

PREFIX = "sqlite:///"
ARTIFACTS = "/outputs/mlflow-artifacts"
"""The folder of artifacts, from that of the store's file."""
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # else a page of lines on the new tables
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the run prints its address itself
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # MLflow's own 120 s and 7 retries would take minutes. The mirror tries again, and nobody waits for it.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}
"""Settings of MLflow, where the user's environment does not say otherwise."""
USUAL_SERVER = "http://127.0.0.1:5000"
"""The address of `mlflow ui`."""
TRAINING = {"workflowType": "machine_learning"}
"""In an address: without it a new browser shows the pages of language models."""
EXPERIMENT = {"mlflow.experimentKind": "custom_model_development"}
"""Tags of the experiment: its pages are those of training, not of language models."""
OTHERWISE = "mend it, name another with loggers.mlflow.tracking_uri=..., or run with logger=csv"
"""The remedies for a store that cannot be used."""


def default_uri() -> str:
    """The store beside the project."""
    return f"{PREFIX}{project_root() / 'mlflow.db'}"


def store_uri() -> str:
    """The tracking store unless a run's config names another."""
    return os.environ.get("MLFLOW_TRACKING_URI") or default_uri()


def store_file(uri: str) -> Path | None:
    """The file of an SQLite store, absolute; None for a store of another kind."""
    if not uri.startswith(PREFIX):
        return None
    file = Path(uri.removeprefix(PREFIX).partition("?")[0])
    return file.parent.resolve() / file.name


def is_missing(uri: str) -> bool:
    """True if an SQLite store has no file: opening it would make an empty one."""
    file = store_file(uri)
    return file is not None and not file.is_file()


def open_client(uri: str) -> MlflowClient:
    """A client of the store; it asks a server nothing yet. Raises `UserError` as `_correct_places` does."""
    _set_up()
    from mlflow import MlflowClient

    with _one_process_at_a_time(uri):
        _correct_places(uri)
        return MlflowClient(tracking_uri=uri)


def open_store(uri: str, experiment: str) -> tuple[MlflowClient, str]:
    """A client of the store and the experiment's id; both are made where they do not exist yet.

    Raises `UserError` where the experiment has been deleted, and the errors of MLflow.
    """
    client = open_client(uri)
    from mlflow.exceptions import MlflowException

    with _one_process_at_a_time(uri):
        found = client.get_experiment_by_name(experiment)
        if found is None:
            with suppress(MlflowException):  # another run has made it in this moment
                client.create_experiment(
                    experiment, artifact_location=artifact_location(uri), tags=EXPERIMENT
                )
            found = client.get_experiment_by_name(experiment)
        if found is None:
            raise MlflowException(f"the experiment {experiment} is neither there nor can it be made")
    if found.lifecycle_stage != "active":
        raise UserError(
            f"loggers.mlflow.experiment={experiment} has been deleted in the tracking store {uri}: restore it "
            f"(MLFLOW_TRACKING_URI={uri} mlflow experiments restore --experiment-id {found.experiment_id}), or "
            "name another one, as in loggers.mlflow.experiment=more."
        )
    with suppress(MlflowException):  # on a shared server only the owner may set tags
        for key in EXPERIMENT.keys() - found.tags.keys():
            client.set_experiment_tag(found.experiment_id, key, EXPERIMENT[key])
    return client, found.experiment_id


@contextmanager
def store_needed(uri: str, advice: str = OTHERWISE) -> Iterator[None]:
    """Make one sentence, a `UserError`, of the store's errors inside."""
    _set_up()
    try:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        raise UserError("loggers.mlflow needs MLflow: pip install mlflow, or run with logger=csv.") from None
    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise UserError(
            f"loggers.mlflow: the tracking store {uri} cannot be used ({root_cause(error)}): {advice}."
        ) from error


def root_cause(error: BaseException) -> str:
    """The innermost error in a line: MLflow's own wraps three others in a page of text."""
    while deeper := error.__cause__ or error.__context__:
        error = deeper
    file = isinstance(error, OSError) and error.filename
    return f"{file}: {brief(error)}" if file else brief(error)


def artifact_location(uri: str) -> str | None:
    """A server decides itself; with a database MLflow would take the current directory."""
    if uri.split("://")[0] in ("http", "https", "databricks"):
        return None
    return _artifacts_of(store_file(uri) or project_root() / "mlflow.db")


def where_to_look(uri: str, page: str) -> str:
    """The address of a page (the part from #), or the command that shows it."""
    if uri.startswith("http"):
        return f"{uri.rstrip('/')}/{page}"
    own = uri == default_uri()
    server = f"`mlflow ui` in {project_root()}" if own else f"`mlflow ui --backend-store-uri {uri}`"
    return f"run {server}, then open {USUAL_SERVER}/{page}"


def run_page(experiment_id: str, run_id: str) -> str:
    """The page of a run, as the end of an address."""
    return f"#/experiments/{experiment_id}/runs/{run_id}?{urlencode(TRAINING)}"


def _set_up() -> None:
    """MLflow reads some of its settings when it is imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def _artifacts_of(file: Path) -> str:
    """The address of the folder of artifacts that belongs to a store's file."""
    return file.parent.as_uri() + ARTIFACTS


@contextmanager
def _one_process_at_a_time(uri: str) -> Iterator[None]:
    """Processes that create the tables of one SQLite file at the same moment crash: here they take turns."""
    file = store_file(uri)
    if file is None:
        yield
        return
    from filelock import FileLock

    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        yield


def _correct_places(uri: str) -> None:
    """Have an SQLite store look for artifacts where they are now, if its folder has moved.

    Experiments get the place for the artifacts of later runs. A finished run gets it where its files are there. Places
    that we did not choose stay. Raises `UserError` where the file cannot be changed.
    """
    file = store_file(uri)
    if file is None or not file.is_file():
        return
    home, here = _artifacts_of(file), file.parent / ARTIFACTS[1:]
    changes = []
    with closing(sqlite3.connect(file)) as database:
        for table, key, column in (
            ("experiments", "experiment_id", "artifact_location"),
            ("runs", "run_uuid", "artifact_uri"),
        ):
            try:
                rows = database.execute(
                    f"SELECT {key}, {column} FROM {table} WHERE {column} LIKE '%{ARTIFACTS}%'"
                )
                places = rows.fetchall()
            except sqlite3.DatabaseError:  # no store yet, or no database: MLflow says so
                return
            for name, place in places:
                rest = place.rpartition(ARTIFACTS)[2]
                there = table == "experiments" or Path(f"{here}{rest}").is_dir()
                if rest[:1] in ("", "/") and place != home + rest and there:
                    changes.append((f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (home + rest, name)))
        try:
            with database:
                for statement, values in changes:
                    database.execute(statement, values)
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"The tracking store {uri} has moved, and the places of its artifacts cannot be corrected in it "
                f"({brief(error)}): it needs a file that you may write to."
            ) from error
