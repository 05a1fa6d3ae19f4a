"""The files of runs in the tracking store, for reports and exports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedspa.core.errors import UserError
from fedspa.tracking.store import is_missing, open_client, root_cause, store_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient


def client_to_read(asked: str) -> MlflowClient:
    """A client of the tracking store that `asked`, an option such as runs=x, needs.

    Raises `UserError` if there is no store, or MLflow is not installed.
    """
    uri = store_uri()
    if is_missing(uri):
        raise UserError(f"{asked}: there is no such folder, and no tracking store at {uri}.")
    try:
        return open_client(uri)
    except ImportError:
        raise UserError(f"{asked} needs MLflow, which is not installed: give a run's folder.") from None


def artifacts(client: MlflowClient, run_id: str) -> Path:
    """The folder of a run's artifacts: a local store's own, or a download.

    Raises `UserError` if there are none; its sentence has no full stop.
    """
    from mlflow.artifacts import download_artifacts

    where, status = f"the tracking store {client.tracking_uri}", "FINISHED"
    try:
        info = client.get_run(run_id).info
        where, status = info.artifact_uri, info.status
        if client.list_artifacts(run_id):
            return Path(download_artifacts(run_id=run_id, tracking_uri=client.tracking_uri))
        reason = "nothing is there"
    except Exception as error:  # of any of MLflow's kinds of stores
        reason = root_cause(error).rstrip(".")
    still = "" if status == "FINISHED" else f", and it is {status}"
    raise UserError(f"its files are not in {where} ({reason}){still}")
