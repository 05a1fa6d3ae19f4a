"""A store in an SQLite file that moves with its project: artifacts, runs that go on, and what is synced later."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tracking_runs import run_info, run_record, run_result

from fedspa.core.errors import UserError
from fedspa.report.runs import folders_in_store
from fedspa.tracking import store
from fedspa.tracking.fanout import Trackers
from fedspa.tracking.mirror import ABOUT, CONFIRMED, Mirror
from fedspa.tracking.mlflow_tracker import MLflowTracker
from fedspa.tracking.run_folder import RunFolder
from fedspa.tracking.store import is_missing, open_client, open_store, store_needed

Stand = Callable[[Path], Path]


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """`stand(root)`: the project lies there from now on, for a process that has seen it nowhere else."""
    import mlflow.tracking._tracking_service.utils as remembered

    monkeypatch.setattr(
        remembered, "_artifact_repos_cache", OrderedDict()
    )  # by run, for as long as a process
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def stand(root: Path) -> Path:
        monkeypatch.setattr(store, "project_root", lambda: root)
        return root

    return stand


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a store and one finished run in it."""
    root = tmp_path_factory.mktemp("made") / "a project"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setattr(store, "project_root", lambda: root)
        finished(MLflowTracker(), root / "outputs/day/first")
    return root


@pytest.fixture
def moved(made: Path, tmp_path: Path, stand: Stand) -> Iterator[Path]:
    """The project at another place; at the old one is nothing any more."""
    here = tmp_path / "moved"
    shutil.copytree(made, here)
    aside = made.rename(made.with_name("aside"))
    try:
        yield stand(here)
        assert not made.exists()
    finally:
        shutil.rmtree(made, ignore_errors=True)
        aside.rename(made)


def finished(tracker: MLflowTracker, folder: Path) -> str:
    """The id of a run that is mirrored in a store, from its start or from an earlier one on."""
    trackers = Trackers([RunFolder(replace=True), tracker])
    trackers.start(run_info(folder))
    for round in range(1, 5):
        trackers.round(run_record(round))
    trackers.finish(run_result())
    return str(Mirror(folder).confirmed["run_id"])


def places(root: Path) -> set[str]:
    with closing(sqlite3.connect(root / "mlflow.db")) as database:
        return {place for (place,) in database.execute("SELECT artifact_uri FROM runs")}


def test_the_artifacts_of_a_moved_store_are_found_and_new_ones_are_beside_it(moved: Path) -> None:
    finished(MLflowTracker(), moved / "outputs/day/second")
    folders = folders_in_store("")
    assert len(folders) == 2
    for folder in folders.values():
        assert folder.is_relative_to(moved / "outputs/mlflow-artifacts")
        assert (folder / "summary.json").is_file()


def test_a_run_whose_files_have_not_moved_keeps_its_place(moved: Path) -> None:
    before = places(moved)
    shutil.rmtree(moved / "outputs/mlflow-artifacts")
    client, experiment = open_store(f"sqlite:///{moved / 'mlflow.db'}", "fedspa")
    assert places(moved) == before
    found = client.get_experiment(experiment)
    assert found.artifact_location == (moved / "outputs/mlflow-artifacts").as_uri()


def test_a_store_that_has_not_moved_is_not_written(made: Path) -> None:
    file = made / "mlflow.db"
    before = file.read_bytes()
    file.chmod(0o444)
    try:
        store._correct_places(f"sqlite:///{file}")
    finally:
        file.chmod(0o644)
    assert file.read_bytes() == before


def test_places_that_are_not_ours_stay(moved: Path) -> None:
    client = open_client(f"sqlite:///{moved / 'mlflow.db'}")
    theirs = client.create_experiment("theirs", artifact_location="file:///shared/outputs/mlflow-artifacts2")
    run = client.create_run(theirs).info
    open_client(f"sqlite:///{moved / 'mlflow.db'}")
    assert client.get_experiment(theirs).artifact_location == "file:///shared/outputs/mlflow-artifacts2"
    assert client.get_run(run.run_id).info.artifact_uri == run.artifact_uri


def test_a_file_that_is_no_database_is_left_to_mlflow(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("no database" * 100)
    store._correct_places(f"sqlite:///{tmp_path / 'mlflow.db'}")
    with pytest.raises(UserError, match="cannot be used"), store_needed("its"):
        open_store(f"sqlite:///{tmp_path / 'mlflow.db'}", "fedspa")


def note_store(folder: Path, uri: str) -> None:
    """Have the folder say that its run is in that store."""
    about = json.loads((folder / "mlflow.json").read_text())
    (folder / "mlflow.json").write_text(json.dumps({**about, "store": uri}))


@pytest.mark.parametrize("named", ["", "now"])
@pytest.mark.parametrize("noted", ["", "old"])
def test_a_run_goes_on_after_its_project_has_moved(made: Path, moved: Path, noted: str, named: str) -> None:
    """`noted` in its folder: no address, or the old one; `named` on the command line: the new one, or none."""
    folder = moved / "outputs/day/first"
    assert json.loads((folder / "mlflow.json").read_text())["store"] == ""  # the project's own has no address
    if noted:
        note_store(folder, f"sqlite:///{made / 'mlflow.db'}")
    (run_id,) = (place.split("/")[-2] for place in places(moved))
    tracker = MLflowTracker(tracking_uri=f"sqlite:///{moved / 'mlflow.db'}" if named else None)
    assert finished(tracker, folder) == run_id


def test_a_copied_project_goes_on_in_its_own_store(made: Path, tmp_path: Path, stand: Stand) -> None:
    here = tmp_path / "copy"
    shutil.copytree(made, here)
    stand(here)
    finished(MLflowTracker(), here / "outputs/day/first")
    (place,) = places(here)
    assert place.startswith(here.as_uri())


def test_a_store_that_is_gone_is_told_and_none_is_made(moved: Path, tmp_path: Path) -> None:
    folder, gone = moved / "outputs/day/first", f"sqlite:///{tmp_path}/elsewhere/mlflow.db"
    tracker = MLflowTracker(tracking_uri=gone)
    with pytest.raises(UserError, match=r"no tracking store.*loggers\.mlflow\.tracking_uri=.*logger=csv"):
        tracker.start(run_info(folder))
    (moved / "mlflow.db").unlink()
    with pytest.raises(UserError, match="no tracking store.*MLFLOW_TRACKING_URI"):
        Mirror(folder).sync()
    assert is_missing(gone) and not (tmp_path / "elsewhere").exists() and not (moved / "mlflow.db").exists()


def test_what_is_left_is_synced_after_the_project_has_moved(moved: Path) -> None:
    folder = moved / "outputs/day/first"
    run_id = Mirror(folder).confirmed["run_id"]
    client = open_client(f"sqlite:///{moved / 'mlflow.db'}")
    client.update_run(run_id, status="RUNNING")
    (folder / CONFIRMED).write_text(json.dumps({"run_id": run_id, "round": 2}))
    Mirror(folder).sync()
    assert client.get_run(run_id).info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(run_id, "train/loss")] == [1, 2, 3, 4]


def test_the_store_that_is_named_now_comes_before_the_one_of_the_folder(stand, monkeypatch, tmp_path):
    stand(tmp_path / "project")
    began, gone = (f"sqlite:///{tmp_path / name}" for name in ("began.db", "gone.db"))
    (tmp_path / "began.db").touch()
    (tmp_path / ABOUT).write_text(json.dumps({"store": began, "start": 0}))
    assert Mirror(tmp_path).uri == began
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert Mirror(tmp_path).uri == "http://127.0.0.1:5000"
    assert Mirror(tmp_path, "http://other").uri == "http://other"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    (tmp_path / ABOUT).write_text(json.dumps({"store": gone, "start": 0}))
    assert Mirror(tmp_path).uri == store.default_uri()
