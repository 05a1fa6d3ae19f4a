"""A tracking store that is away, slow or forgetful: the run goes on, and no point is lost or doubled."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow_server import TrackingServer
from tracking_runs import run_info, run_record, run_result

from fedspa.core.errors import UserError
from fedspa.tracking import mlflow_tracker
from fedspa.tracking.fanout import Trackers
from fedspa.tracking.mirror import ABOUT, CONFIRMED, Mirror
from fedspa.tracking.mlflow_tracker import MLflowTracker
from fedspa.tracking.run_folder import RunFolder

SYNC = Path(__file__).parents[1] / "src/sync.py"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TrackingServer]:
    server = TrackingServer(tmp_path / "artifacts")
    yield server
    server.down()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses and patience of the tests; the real ones are tens of seconds."""
    monkeypatch.setattr(mlflow_tracker, "LAST_PAUSE_S", 0.05)
    monkeypatch.setattr(mlflow_tracker, "LONGEST_PAUSE_S", 0.2)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def started(server: TrackingServer, folder: Path, completed: int = 0) -> Trackers:
    tracker = MLflowTracker(tracking_uri=server.uri, flush_seconds=0.05)
    trackers = Trackers([RunFolder(replace=True), tracker])
    trackers.start(run_info(folder, rounds=50, completed=completed))
    return trackers


def rounds(trackers: Trackers, first: int, last: int) -> None:
    for round in range(first, last + 1):
        trackers.round(run_record(round))


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def impatient_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_tracker, "PATIENCE_S", 0.5)


def test_away_in_the_middle_and_back(
    server: TrackingServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trackers = started(server, tmp_path / "run")
    rounds(trackers, 1, 2)
    wait_for(lambda: server.steps("train/loss") == [1, 2])
    server.down()
    rounds(trackers, 3, 9)  # whoever waited for the server would wait for ever
    wait_for(lambda: len(caplog.records) == 1)
    rounds(trackers, 10, 12)
    server.up()
    wait_for(lambda: server.steps("train/loss") == list(range(1, 13)))
    server.down()
    rounds(trackers, 13, 14)
    server.up()
    trackers.finish(run_result())
    assert server.steps("train/loss") == server.steps("time/total_s") == list(range(1, 15))
    assert server.steps("final/accuracy/global") == [14]
    assert server.run["info"]["status"] == "FINISHED"
    assert (server.uploads / "rounds.csv").exists()
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "takes nothing now (Connection" in warning.getMessage()
    address = f"{server.uri}/#/experiments/1/runs/{server.run['info']['run_id']}"
    assert capsys.readouterr().out == f"In MLflow: {address}?workflowType=machine_learning\n"


def test_away_at_the_end_is_told_and_a_command_goes_on(
    server: TrackingServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "run"
    trackers = started(server, folder)
    rounds(trackers, 1, 3)
    wait_for(lambda: server.steps("train/loss") == [1, 2, 3])
    server.down()
    rounds(trackers, 4, 5)
    impatient_end(monkeypatch)
    trackers.finish(run_result())
    assert capsys.readouterr().out == (
        f"MLflow at {server.uri} does not have everything yet (Connection refused): "
        f"python src/sync.py {folder} sends the rest.\n"
    )
    assert json.loads((folder / CONFIRMED).read_text())["round"] == 3
    away = subprocess.run([sys.executable, str(SYNC), str(folder)], capture_output=True, text=True)
    assert away.returncode == 2 and "start or mend it, then sync again" in away.stderr  # nothing is lost
    server.up()
    for _ in range(2):  # the second time there is nothing to send
        before = len(server.calls)
        done = subprocess.run([sys.executable, str(SYNC), str(tmp_path)], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"In MLflow: {folder}\n"), done.stderr
    assert not [
        call for call in server.calls[before:] if call.startswith(("runs/log", "runs/set", "runs/update"))
    ]
    assert server.steps("train/loss") == [1, 2, 3, 4, 5]
    assert server.run["info"]["status"] == "FINISHED" and server.steps("final/samples_per_s") == [5]
    sent = {file.name for file in server.uploads.iterdir()}
    assert {"rounds.csv", "summary.json"} <= sent and not {ABOUT, CONFIRMED} & sent


def test_files_that_cannot_be_uploaded_leave_no_run_open(
    server: TrackingServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "run"
    trackers = started(server, folder)
    rounds(trackers, 1, 2)
    wait_for(lambda: server.steps("train/loss") == [1, 2])
    (tmp_path / "artifacts").write_text("no folder")  # a place that only the server can write to, say
    server.forbidden.add("runs/log-batch")
    impatient_end(monkeypatch)
    trackers.finish(run_result())
    assert server.run["info"]["status"] == "FINISHED" and server.steps("train/loss") == [1, 2]
    end_time = server.run["info"]["end_time"]
    assert "(results: PERMISSION_DENIED: runs/log-batch is forbidden)" in capsys.readouterr().out
    server.forbidden.clear()
    with pytest.raises(OSError, match="config.yaml: .*Not a directory"):
        Mirror(folder).sync()
    (tmp_path / "artifacts").unlink()
    Mirror(folder).sync()
    assert (server.uploads / "rounds.csv").exists() and server.run["info"]["end_time"] == end_time


def test_a_folder_that_was_not_tracked_and_a_damaged_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was not tracked by MLflow"):
        Mirror(tmp_path).sync()
    for content in ("", "{}", "[1]", '{"store": 1}', '{"store": ""}'):
        (tmp_path / ABOUT).write_text(content)
        with pytest.raises(UserError, match="is damaged"):
            Mirror(tmp_path).sync()


def test_lost_answers_double_nothing(server: TrackingServer, tmp_path: Path) -> None:
    trackers = started(server, tmp_path / "run")
    server.lost.add("runs/log-batch")  # the server writes the points, but its answer never comes
    rounds(trackers, 1, 3)
    wait_for(lambda: bool(server.steps("train/loss")))
    rounds(trackers, 4, 5)
    server.lost.clear()
    trackers.finish(run_result())
    assert server.steps("train/loss") == [1, 2, 3, 4, 5]


def test_a_metric_gets_a_name_that_mlflow_takes(server: TrackingServer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trackers = Trackers([RunFolder(), MLflowTracker(tracking_uri=server.uri)])
    trackers.start(replace(run_info(folder), extras=("share in %",)))
    trackers.round(replace(run_record(1), extras={"share in %": 2.5}))
    trackers.finish(run_result())
    assert server.steps("train/share in _") == server.steps("train/loss") == [1]


def test_a_run_that_is_deleted_in_the_store_keeps_its_points(
    server: TrackingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers = started(server, tmp_path / "run")
    rounds(trackers, 1, 2)
    wait_for(lambda: server.steps("train/loss") == [1, 2])
    server.run["info"]["lifecycle_stage"] = "deleted"
    rounds(trackers, 3, 4)
    impatient_end(monkeypatch)
    trackers.finish(run_result())
    server.run["info"]["lifecycle_stage"] = "active"
    Mirror(tmp_path / "run").sync()
    assert server.steps("train/loss") == [1, 2, 3, 4]


def test_a_server_that_does_not_answer_holds_up_no_round(server: TrackingServer, tmp_path: Path) -> None:
    trackers = started(server, tmp_path / "run")
    server.answering.clear()
    rounds(trackers, 1, 50)  # whoever waited for an answer would wait for ever
    assert server.steps("train/loss") == []
    server.answering.set()
    trackers.finish(run_result())
    assert server.steps("train/loss") == list(range(1, 51))
    assert server.run["info"]["status"] == "FINISHED"


def test_a_resumed_run_goes_on_in_the_same_run_without_doubled_or_missing_steps(
    server: TrackingServer, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    first = started(server, folder)
    rounds(first, 1, 6)
    wait_for(lambda: server.steps("train/loss") == [1, 2, 3, 4, 5, 6])
    (tracker,) = [one for one in first._started if isinstance(one, MLflowTracker)]
    tracker._given_up = True  # kill -9: the run stays RUNNING, and nothing more is said

    second = started(server, folder, completed=4)  # from the checkpoint of round 4
    rounds(second, 5, 8)
    second.finish(run_result())
    assert len(server.runs) == 1
    assert server.steps("train/loss") == server.steps("accuracy/global") == list(range(1, 9))
    assert server.run["info"]["status"] == "FINISHED"


def test_a_preempted_run_is_killed_then_running_again(server: TrackingServer, tmp_path: Path) -> None:
    first = started(server, tmp_path / "run")
    rounds(first, 1, 2)
    first.abort("KILLED", "preempted")
    assert server.run["info"]["status"] == "KILLED" and server.run["tags"]["ended_because"] == "preempted"
    second = started(server, tmp_path / "run", completed=2)
    assert server.run["info"]["status"] == "RUNNING" and "ended_because" not in server.run["tags"]
    rounds(second, 3, 3)
    second.finish(run_result())
    assert server.steps("train/loss") == [1, 2, 3]


def test_a_run_that_began_without_mlflow_is_mirrored_whole_when_it_goes_on(
    server: TrackingServer, tmp_path: Path
) -> None:
    folder = RunFolder()
    folder.start(run_info(tmp_path / "run"))
    for round in (1, 2):
        folder.round(run_record(round))
    folder.abort("KILLED", "")
    second = started(server, tmp_path / "run", completed=2)
    rounds(second, 3, 3)
    second.finish(run_result())
    assert server.steps("train/loss") == [1, 2, 3]


def test_a_run_that_is_no_longer_in_the_store_cannot_be_resumed(
    server: TrackingServer, tmp_path: Path
) -> None:
    first = started(server, tmp_path)
    rounds(first, 1, 1)
    first.abort("KILLED", "")
    server.run["info"]["lifecycle_stage"] = "deleted"
    with pytest.raises(UserError, match="has been deleted: restore it there, or resume with logger=csv"):
        started(server, tmp_path, completed=1)
    server.runs.clear()
    with pytest.raises(UserError, match="no run .*logger=csv"):
        started(server, tmp_path, completed=1)


@pytest.mark.parametrize("silent", [False, True])
def test_a_server_that_cannot_be_reached_is_refused_at_the_start(tmp_path: Path, silent: bool) -> None:
    with socket.socket() as deaf:  # accepts a connection, and never answers
        deaf.bind(("127.0.0.1", 0))
        if silent:
            deaf.listen()
        uri = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(UserError) as refusal:
            MLflowTracker(tracking_uri=uri).start(run_info(tmp_path))
    reason = "timed out" if silent else "Connection refused"
    assert str(refusal.value) == (
        f"loggers.mlflow: the tracking store {uri} cannot be used ({reason}): mend it, name another with "
        "loggers.mlflow.tracking_uri=..., or run with logger=csv."
    )


def test_an_experiment_that_only_its_owner_may_describe_takes_runs(
    server: TrackingServer, tmp_path: Path
) -> None:
    started(server, tmp_path / "run").abort("KILLED", "")
    assert server.experiment_tags
    server.experiment_tags.clear()
    server.runs.clear()
    server.guarded = True
    started(server, tmp_path / "other").abort("KILLED", "")
    assert not server.experiment_tags and server.run["info"]["status"] == "KILLED"


def test_an_experiment_that_another_run_makes_in_this_moment_is_taken(
    server: TrackingServer, tmp_path: Path
) -> None:
    server.unseen = 1
    started(server, tmp_path / "run").abort("KILLED", "")
    assert "experiments/create" in server.calls and server.run["info"]["status"] == "KILLED"


def test_an_experiment_that_was_deleted_is_named_with_the_ways_out(
    server: TrackingServer, tmp_path: Path
) -> None:
    server.experiment_stage = "deleted"
    with pytest.raises(UserError, match="loggers.mlflow.experiment=fedspa has been deleted") as refusal:
        started(server, tmp_path / "run")
    assert "restore" in str(refusal.value) and "loggers.mlflow.experiment=more" in str(refusal.value)
