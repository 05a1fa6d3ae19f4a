"""A tracking store that is away, slow or forgetful: the run goes on, and no point is lost or doubled."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from mlflow_server import TrackingServer
from tracking_runs import run_info, run_record, run_result

from fedspa.core.errors import UserError
from fedspa.tracking import mlflow_connection, mlflow_delivery
from fedspa.tracking.mlflow_delivery import UNDELIVERED, Ending, Point
from fedspa.tracking.mlflow_store import MLflowTracker
from fedspa.tracking.undelivered import Undelivered

ENDING = Ending("FINISHED", 4, weights=False, tags={"a": "b"})
DELIVER = Path(__file__).parents[1] / "src/deliver.py"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TrackingServer]:
    server = TrackingServer(tmp_path / "artifacts")
    yield server
    server.down()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses and patience of the tests; the real ones are tens of seconds."""
    monkeypatch.setattr(mlflow_delivery, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(mlflow_delivery, "LONGEST_PAUSE_S", 0.2)
    monkeypatch.setattr(mlflow_delivery, "PATIENCE_S", 1.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def tracker_of(server: TrackingServer) -> MLflowTracker:
    return MLflowTracker(tracking_uri=server.uri, flush_rounds=1)


def started(server: TrackingServer, folder: Path) -> MLflowTracker:
    tracker = tracker_of(server)
    folder.mkdir(exist_ok=True)
    (folder / "rounds.csv").write_text("round\n")
    tracker.start(run_info(folder))
    return tracker


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def rounds(tracker: MLflowTracker, first: int, last: int) -> None:
    for round in range(first, last + 1):
        tracker.round(run_record(round))


def test_away_in_the_middle_and_back(
    server: TrackingServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tracker = started(server, tmp_path / "run")
    rounds(tracker, 1, 2)
    wait_for(lambda: server.steps("train/loss") == [1, 2])
    server.down()
    rounds(tracker, 3, 9)  # whoever waited for the server would wait for ever
    wait_for(lambda: len(caplog.records) == 1)
    rounds(tracker, 10, 12)
    time.sleep(0.3)  # several tries fail
    server.up()
    wait_for(lambda: server.steps("train/loss") == list(range(1, 13)))
    server.down()
    rounds(tracker, 13, 14)
    time.sleep(0.2)
    server.up()
    tracker.finish(run_result())
    assert server.steps("train/loss") == server.steps("time/total_s") == list(range(1, 15))
    assert server.steps("final/global_accuracy") == [4]
    assert server.run["info"]["status"] == "FINISHED"
    assert (server.uploads / "rounds.csv").exists()
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "takes no metrics now (Connection refused): the run goes on" in warning.getMessage()
    address = f"{server.uri}/#/experiments/1/runs/{server.run['info']['run_id']}"
    assert capsys.readouterr().out == f"In MLflow: {address}?workflowType=machine_learning\n"
    assert not (tmp_path / "run" / UNDELIVERED).exists()


def test_away_at_the_end_leaves_the_rest_in_the_folder(
    server: TrackingServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    tracker = started(server, folder)
    rounds(tracker, 1, 3)
    wait_for(lambda: server.steps("train/loss") == [1, 2, 3])
    server.down()
    rounds(tracker, 4, 5)
    begin = time.monotonic()
    tracker.finish(run_result())
    assert mlflow_delivery.PATIENCE_S <= time.monotonic() - begin < 20 * mlflow_delivery.PATIENCE_S
    told = capsys.readouterr().out
    assert told == (
        f"MLflow at {server.uri} did not get everything (Connection refused): "
        f"python src/deliver.py {folder} sends the rest.\n"
    )
    with pytest.raises(
        UserError, match="start or mend it, then deliver again"
    ):  # still away: nothing is lost
        Undelivered.load(folder).deliver(folder)
    server.up()
    done = subprocess.run([sys.executable, str(DELIVER), str(folder)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"Delivered: {folder}\n"), done.stderr
    assert server.steps("train/loss") == [1, 2, 3, 4, 5]
    assert server.run["info"]["status"] == "FINISHED" and server.steps("final/samples_per_s") == [4]
    sent = {file.name for file in server.uploads.iterdir()}
    assert sent == {"rounds.csv"}  # not the file of what is undelivered
    assert [file.name for file in folder.iterdir()] == ["rounds.csv"]


def test_files_that_cannot_be_uploaded_leave_no_run_open(
    server: TrackingServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    tracker = started(server, folder)
    rounds(tracker, 1, 2)
    (tmp_path / "artifacts").write_text("no folder")  # a place that only the server can write to, say
    tracker.finish(run_result())
    assert server.run["info"]["status"] == "FINISHED" and server.steps("train/loss") == [1, 2]
    end_time = server.run["info"]["end_time"]
    told = capsys.readouterr().out
    assert told.startswith(
        f"MLflow at {server.uri} did not get everything (rounds.csv: Not a directory): python"
    )
    assert told.count("\n") == 1 and not caplog.records
    with pytest.raises(
        UserError, match="rounds.csv: Not a directory.*: start or mend it, then deliver again"
    ):
        Undelivered.load(folder).deliver(folder)
    (tmp_path / "artifacts").unlink()
    Undelivered.load(folder).deliver(folder)
    assert (server.uploads / "rounds.csv").exists() and not (folder / UNDELIVERED).exists()
    assert server.run["info"] | {"status": "FINISHED", "end_time": end_time} == server.run["info"]


def test_what_is_refused_at_the_end_keeps_nothing_else_from_the_store(
    server: TrackingServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = started(server, tmp_path / "run")
    rounds(tracker, 1, 2)
    server.forbidden.add("runs/set-tag")
    tracker.abort("FAILED", "why")
    assert server.run["info"]["status"] == "FAILED"
    assert (server.uploads / "rounds.csv").exists()
    assert "(the tag ended_because: PERMISSION_DENIED: runs/set-tag is forbidden)" in capsys.readouterr().out


def test_nothing_to_deliver_and_a_damaged_rest_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds nothing to deliver"):
        Undelivered.load(tmp_path)
    sound = json.loads(json.dumps(asdict(Undelivered("http://h", "r", [Point("a", 1.0, 2, 3)], ENDING))))
    others: dict[str, list[object]] = {
        "points": [[[1, 1.0, 2, 3]], [["a", "1", 2, 3]], [["a", 1.0, 2.5, 3]], [["a", 1.0]], 7],
        "ending": [{}, 7, {**sound["ending"], "tags": 3}, {**sound["ending"], "tags": {"a": 1}}],
        "run_id": [None, 5],
        "tracking_uri": [["http://h"]],
    }
    wrong = [json.dumps({**sound, key: value}) for key, values in others.items() for value in values]
    for content in ("", "{}", '{"points": [[1]]}', "[1]", "\udcff", *wrong):
        (tmp_path / UNDELIVERED).write_bytes(content.encode(errors="surrogateescape"))
        with pytest.raises(UserError, match="is damaged"):
            Undelivered.load(tmp_path)


def test_lost_answers_double_nothing(server: TrackingServer, tmp_path: Path) -> None:
    tracker = started(server, tmp_path / "run")
    server.lose_answers = True  # the server writes the points, but its answer never comes
    rounds(tracker, 1, 3)
    wait_for(lambda: server.calls.count("runs/log-batch") >= 2)  # the first is that of the params
    rounds(tracker, 4, 5)
    time.sleep(0.2)
    server.lose_answers = False
    tracker.finish(run_result())
    assert server.steps("train/loss") == [1, 2, 3, 4, 5]


def test_a_point_that_the_store_refuses_does_not_hold_up_the_others(
    server: TrackingServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = started(server, tmp_path / "run")
    for round in range(1, 9):
        bad = {"share in %": 1.0} if round > 2 else {}  # no name for a metric of MLflow
        tracker.round(replace(run_record(round), extras={"density": 0.5, **bad}))
        if round == 4:
            wait_for(lambda: server.steps("train/density") == list(range(1, 5)))
    tracker.finish(run_result())
    for key in ("train/loss", "train/density", "time/total_s"):
        assert server.steps(key) == list(range(1, 9))
    assert server.steps("final/global_accuracy") == [4] and server.run["info"]["status"] == "FINISHED"
    assert server.steps("train/share in %") == []
    (warning,) = caplog.messages
    assert (
        "train/share in % = 1.0 is refused by the tracking store (INVALID_PARAMETER_VALUE: Invalid" in warning
    )
    assert not (tmp_path / "run" / UNDELIVERED).exists()


def test_a_run_that_is_deleted_in_the_store_keeps_its_points(server: TrackingServer, tmp_path: Path) -> None:
    tracker = started(server, tmp_path / "run")
    rounds(tracker, 1, 2)
    wait_for(lambda: server.steps("train/loss") == [1, 2])
    server.run["info"]["lifecycle_stage"] = "deleted"
    rounds(tracker, 3, 4)
    tracker.finish(run_result())
    server.run["info"]["lifecycle_stage"] = "active"
    Undelivered.load(tmp_path / "run").deliver(tmp_path / "run")
    assert server.steps("train/loss") == [1, 2, 3, 4]


def test_a_slow_server_holds_up_no_round(server: TrackingServer, tmp_path: Path) -> None:
    tracker = started(server, tmp_path / "run")
    server.delay = 0.3
    begin = time.monotonic()
    rounds(tracker, 1, 50)
    assert time.monotonic() - begin < 50 * server.delay / 3
    tracker.finish(run_result())  # slow but answering: it is waited for
    assert server.steps("train/loss") == list(range(1, 51))
    assert server.run["info"]["status"] == "FINISHED"


def test_a_resumed_run_goes_on_in_the_same_run_without_doubled_or_missing_steps(
    server: TrackingServer, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    first = started(server, folder)
    rounds(first, 1, 2)
    wait_for(lambda: server.steps("train/loss") == [1, 2])
    server.down()
    rounds(first, 3, 4)
    checkpoint = json.loads(json.dumps(first.state_dict()))  # rounds 3 and 4 are undelivered here
    server.up()
    rounds(first, 5, 6)
    wait_for(lambda: server.steps("train/loss") == [1, 2, 3, 4, 5, 6])
    assert first._delivery
    first._delivery._given_up = True  # kill -9: the run stays RUNNING, and nothing more is said

    second = tracker_of(server)
    second.load_state_dict(checkpoint)
    second.start(run_info(folder))
    rounds(second, 5, 8)
    second.finish(run_result())
    assert len(server.runs) == 1
    assert server.steps("train/loss") == server.steps("global/accuracy_mean") == list(range(1, 9))
    assert server.run["info"]["status"] == "FINISHED"


def test_a_preempted_run_is_killed_then_running_again(server: TrackingServer, tmp_path: Path) -> None:
    first = started(server, tmp_path / "run")
    rounds(first, 1, 2)
    first.abort("KILLED", "preempted")
    assert server.run["info"]["status"] == "KILLED" and server.run["tags"]["ended_because"] == "preempted"
    state = first.state_dict()
    assert state["points"] == []
    (tmp_path / "run" / UNDELIVERED).touch()  # of an end that could not be told
    second = tracker_of(server)
    second.load_state_dict(state)
    second.start(run_info(tmp_path / "run"))
    assert server.run["info"]["status"] == "RUNNING" and "ended_because" not in server.run["tags"]
    assert not (tmp_path / "run" / UNDELIVERED).exists()
    rounds(second, 3, 3)
    second.finish(run_result())
    assert server.steps("train/loss") == [1, 2, 3]


def test_a_run_that_is_no_longer_in_the_store_cannot_be_resumed(
    server: TrackingServer, tmp_path: Path
) -> None:
    tracker = tracker_of(server)
    tracker.load_state_dict({"run_id": "gone", "tracking_uri": server.uri, "points": []})
    with pytest.raises(UserError, match="no run gone.*logger=csv"):
        tracker.start(run_info(tmp_path))
    first = started(server, tmp_path)
    server.run["info"]["lifecycle_stage"] = "deleted"
    tracker = tracker_of(server)
    tracker.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match="has been deleted: restore it there, or resume with logger=csv"):
        tracker.start(run_info(tmp_path))


def test_a_tracker_without_a_run_has_no_state() -> None:
    tracker = MLflowTracker(tracking_uri="http://127.0.0.1:1")
    assert tracker.state_dict() == {}
    tracker.load_state_dict({})  # the run before had no tracking store: this one gets a run of its own


@pytest.mark.parametrize("silent", [False, True])
def test_a_server_that_cannot_be_reached_is_refused_at_the_start(tmp_path: Path, silent: bool) -> None:
    with socket.socket() as deaf:  # accepts a connection, and never answers
        deaf.bind(("127.0.0.1", 0))
        if silent:
            deaf.listen()
        uri = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(UserError) as refusal:
            MLflowTracker(tracking_uri=uri).start(run_info(tmp_path))
        assert time.monotonic() - begin < 20  # after 1 s, as set above, or however slow this machine is
    reason = "timed out" if silent else "Connection refused"
    assert str(refusal.value) == (
        f"loggers.mlflow: the tracking store {uri} cannot be used ({reason}): mend it, name another with "
        "loggers.mlflow.tracking_uri=..., or run with logger=csv."
    )


def test_an_experiment_that_only_its_owner_may_describe_takes_runs(
    server: TrackingServer, tmp_path: Path
) -> None:
    started(server, tmp_path / "run").finish(run_result())
    assert server.experiment_tags
    server.experiment_tags.clear()
    server.runs.clear()
    server.guarded = True
    started(server, tmp_path / "run").finish(run_result())
    assert not server.experiment_tags and server.run["info"]["status"] == "FINISHED"


def test_an_experiment_that_another_run_makes_in_this_moment_is_taken(
    server: TrackingServer, tmp_path: Path
) -> None:
    server.unseen = 1
    started(server, tmp_path / "run").finish(run_result())
    assert "experiments/create" in server.calls and server.run["info"]["status"] == "FINISHED"


def test_an_experiment_that_was_deleted_is_named_with_the_ways_out(
    server: TrackingServer, tmp_path: Path
) -> None:
    server.experiment_stage = "deleted"
    with pytest.raises(UserError, match="loggers.mlflow.experiment=fedspa has been deleted") as refusal:
        started(server, tmp_path / "run")
    assert "mlflow experiments restore --experiment-id 1" in str(refusal.value)
    assert "loggers.mlflow.experiment=more" in str(refusal.value)
    assert not server.runs


def test_the_users_own_timeouts_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "99")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    mlflow_connection.open_client("http://127.0.0.1:1")
    import os

    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "99"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
