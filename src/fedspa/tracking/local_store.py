"""A tracking store in an SQLite file, with its artifacts beside it: both may move with their folder.

MLflow writes absolute places of artifacts into its tables. After a move they name a folder that is gone, which the
next run would make anew: so they are corrected whenever the store is opened.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from fedspa.core.errors import UserError, brief

PREFIX = "sqlite:///"
ARTIFACTS = "/outputs/mlflow-artifacts"
"""The folder of artifacts, from that of the store's file."""


def store_file(uri: str) -> Path | None:
    """The file of an SQLite store, absolute; None for a store of another kind."""
    if not uri.startswith(PREFIX):
        return None
    file = Path(uri.removeprefix(PREFIX).partition("?")[0])
    return file.parent.resolve() / file.name


def is_missing(uri: str) -> bool:
    """Whether an SQLite store has no file, so that to open it would make an empty one."""
    file = store_file(uri)
    return file is not None and not file.is_file()


def artifacts_of(file: Path) -> str:
    """The address of the folder of artifacts that belongs to a store's file."""
    return file.parent.as_uri() + ARTIFACTS


@contextmanager
def one_process_at_a_time(uri: str) -> Iterator[None]:
    """Processes that create the tables of one SQLite file at the same moment crash: they take turns here."""
    file = store_file(uri)
    if file is None:
        yield
        return
    from filelock import FileLock

    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        yield


def correct_places(uri: str) -> None:
    """Have an SQLite store look for artifacts where they are now, if its folder has moved.

    Experiments get the place for the artifacts of runs to come. A finished run gets it where its files are there.
    Only places that we chose are touched. Raises `UserError` where the file cannot be changed.
    """
    file = store_file(uri)
    if file is None or not file.is_file():
        return
    home = artifacts_of(file)
    with closing(sqlite3.connect(file)) as database:
        try:
            experiments = _moved(database, "experiments", "experiment_id", "artifact_location", home)
            runs = _moved(database, "runs", "run_uuid", "artifact_uri", home)
        except sqlite3.DatabaseError:  # no store yet, or no database: MLflow tells
            return
        here = file.parent / ARTIFACTS[1:]
        runs = {
            run: place for run, place in runs.items() if Path(f"{here}{place.removeprefix(home)}").is_dir()
        }
        if not experiments and not runs:
            return
        try:
            with database:
                for statement, places in (
                    ("UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?", experiments),
                    ("UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?", runs),
                ):
                    database.executemany(statement, [(place, key) for key, place in places.items()])
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"The tracking store {uri} has moved, and the places of its artifacts cannot be corrected in it "
                f"({brief(error)}): it needs a file that you may write to."
            ) from error


def _moved(database: sqlite3.Connection, table: str, key: str, column: str, home: str) -> dict[str, str]:
    """The rows of a table whose artifacts should be at another place: that place by the row's key."""
    rows = database.execute(f"SELECT {key}, {column} FROM {table} WHERE {column} LIKE ?", [f"%{ARTIFACTS}%"])
    moved = {}
    for name, place in rows:
        rest = place.rpartition(ARTIFACTS)[2]
        if rest[:1] in ("", "/") and place != home + rest:
            moved[name] = home + rest
    return moved
