"""A run in MLflow, read back through MLflow's own client from a SQLite store of the test."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tracking_runs import faulty_records, run_info, run_record, run_result

from fedspa.core import paths
from fedspa.core.errors import UserError
from fedspa.tracking import mirror, page, store, sweep_run
from fedspa.tracking.fanout import Trackers
from fedspa.tracking.mirror import CONFIRMED, Mirror
from fedspa.tracking.mlflow_tracker import MLflowTracker
from fedspa.tracking.page import flat_params
from fedspa.tracking.run_folder import RunFolder
from fedspa.tracking.store import store_needed

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project's root of its own; its store is made once, which takes seconds."""
    return tmp_path_factory.mktemp("project")


@pytest.fixture(autouse=True)
def project(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "project_root", lambda: root)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def client(root: Path) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{root / 'mlflow.db'}")


def last_run(client: MlflowClient) -> Run:
    experiment = client.get_experiment_by_name("fedspa")
    assert experiment
    return client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])[0]


def begun(folder: Path, rounds: int = 4, tracker: MLflowTracker | None = None, **config: Any) -> Trackers:
    trackers = Trackers([RunFolder(replace=True), tracker or MLflowTracker()])
    trackers.start(run_info(folder, rounds, **config))
    return trackers


def finished_run(folder: Path, rounds: int = 4, tracker: MLflowTracker | None = None, **config: Any) -> None:
    trackers = begun(folder, rounds, tracker, **config)
    for round in range(1, rounds + 1):
        trackers.round(run_record(round))
    trackers.finish(run_result())


def test_a_finished_run_reads_back(
    tmp_path: Path, root: Path, client: MlflowClient, capfd: pytest.CaptureFixture[str]
) -> None:
    finished_run(tmp_path)
    run = last_run(client)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "fedspa-dst-s0.5-digits-seed0"
    assert Path(run.info.artifact_uri.removeprefix("file://")).is_relative_to(
        root / "outputs" / "mlflow-artifacts"
    )
    points = client.get_metric_history(run.info.run_id, "accuracy/global")
    assert [(point.step, point.value) for point in points] == [(1, 31.0), (2, 32.0), (3, 33.0), (4, 34.0)]
    last = run.data.metrics
    assert last["accuracy/local/clients"] == 2
    assert last["cost/traffic_bytes"] == 4 * 6125 and last["cost/traffic_dense_bytes"] == 4 * 12000
    assert last["train/loss"] == 0.25 and last["train/prune_rate"] == 0.5
    assert last["final/accuracy/finetuned"] == 60 and last["final/rounds_to_30/global"] == 1
    assert "final/rounds_to_70/global" not in last
    assert run.data.tags.items() >= {
        "method": "fedspa", "mask": "dst", "dataset": "digits", "model": "small", "partition": "iid",
        "seed": "0", "sparsity": "0.5", "config_hash": "c0ffee", "partition_hash": "beef", "version": "0.1.0",
        "density": "0.4 to 0.5",
    }.items()  # fmt: skip
    note = run.data.tags["mlflow.note.content"]
    assert "3 clients (iid) with 8 training examples" in note
    assert (
        "| personal | 44.00 ± 1.50 | 41.00 | 3 |" in note
        and "| traffic | 24.5 kB | 48.0 kB | 49.0 % |" in note
    )
    assert "| finetuned | 60.00" in note
    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("digits", "beef")
    assert (
        client.get_experiment(run.info.experiment_id).tags["mlflow.experimentKind"]
        == "custom_model_development"
    )
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {
        "config.yaml",
        "rounds.csv",
        "timing.csv",
        "events.csv",
        "clients.csv",
        "tensors.csv",
        "partition.json",
        "summary.json",
    }
    printed = capfd.readouterr()
    page = f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}?workflowType=machine_learning"
    assert printed.out == f"In MLflow: run `mlflow ui` in {root}, then open http://127.0.0.1:5000/{page}\n"
    assert "INFO" not in printed.err  # MLflow's lines on the new tables


def test_events_are_counted_and_a_round_without_training_has_no_loss(
    tmp_path: Path, client: MlflowClient
) -> None:
    tracker = begun(tmp_path, rounds=3)
    for record in faulty_records():
        tracker.round(record)
    tracker.finish(run_result())

    def points(name: str) -> list[tuple[int, float]]:
        return [
            (point.step, point.value)
            for point in client.get_metric_history(last_run(client).info.run_id, name)
        ]

    assert points("faults/dropout") == [(1, 2), (2, 3), (3, 3)]
    assert points("faults/late") == [(2, 1), (3, 1)]
    assert points("faults/empty_round") == [(3, 1)]
    assert points("train/loss") == [(1, 1), (2, 0.5)]


def test_the_page_opens_on_accuracy_also_when_the_first_rounds_are_not_tested(
    tmp_path: Path, client: MlflowClient
) -> None:
    trackers = begun(tmp_path)
    for round in range(1, 5):
        trackers.round(run_record(round, evaluated=round > 2))
        Mirror(tmp_path).sync()
    trackers.finish(run_result())
    run = last_run(client)
    shown = list(run.data.metrics)
    scores = [name for name in shown if name.startswith("accuracy/")]
    assert len(scores) == 21 and shown[:21] == sorted(scores)
    results = [name for name in shown if name.startswith("final/")]
    assert shown[-len(results) :] == sorted(results)
    points = client.get_metric_history(run.info.run_id, "accuracy/personal")
    assert [(point.step, point.value) for point in points if point.value == point.value] == [(3, 43), (4, 44)]
    assert [point.step for point in points] == [1, 3, 4]


def test_weights_go_up_on_request(tmp_path: Path, client: MlflowClient) -> None:
    finished_run(tmp_path, save={"upload_weights": True})
    files = {file.path for file in client.list_artifacts(last_run(client).info.run_id)}
    assert {"weights.safetensors", "masks.safetensors"} <= files


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_an_early_end_is_told_truthfully(status: str, tmp_path: Path, client: MlflowClient) -> None:
    tracker = begun(tmp_path)
    assert last_run(client).info.status == "RUNNING"
    tracker.round(run_record(1))
    tracker.abort(status, "why it ended")
    run = last_run(client)
    assert run.info.status == status and run.info.end_time
    assert run.data.tags["ended_because"] == "why it ended"
    assert run.data.metrics["accuracy/global"] == 31  # the buffer is not lost


def test_an_abort_before_the_run_exists_does_nothing() -> None:
    MLflowTracker().abort("FAILED", "no store")


class Killed(BaseException):
    """As a kill: nothing that waits for an exception sees it."""


@pytest.mark.parametrize("moment", ["created", "noted", "open", "a round"])
def test_a_start_without_a_checkpoint_goes_on_in_the_run_that_was_killed(
    tmp_path: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Killed as soon as the run is created, once the folder knows it, once it is open, with a round in the store."""
    broken = {"created": "_confirm", "noted": "_describe"}
    if method := broken.get(moment):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Mirror, method, lambda *args, **options: (_ for _ in ()).throw(Killed))
            begun(tmp_path)
    else:
        killed = begun(tmp_path)
        if moment == "a round":
            killed.round(run_record(1))
            Mirror(tmp_path).sync()
        for tracker in killed._started:
            if isinstance(tracker, MLflowTracker):
                tracker._given_up = True
    before = last_run(client)
    finished_run(tmp_path)
    after = last_run(client)
    assert (before.info.run_id, before.info.status) == (after.info.run_id, "RUNNING")
    assert after.info.status == "FINISHED" and after.data.params["seed"] == "0"
    points = client.get_metric_history(after.info.run_id, "train/loss")
    assert [point.step for point in points] == [1, 2, 3, 4]


def test_a_start_that_fails_leaves_no_running_run(
    tmp_path: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers = Trackers([RunFolder(), MLflowTracker()])
    with monkeypatch.context() as patch, pytest.raises(UserError, match="away"):
        patch.setattr(mirror, "flat_params", lambda config: (_ for _ in ()).throw(OSError("away")))
        trackers.start(run_info(tmp_path))
    trackers.abort("FAILED", "away")
    assert last_run(client).info.status == "FAILED"


def test_a_hundred_rounds_take_few_calls_and_a_second_sync_takes_none(
    tmp_path: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    sizes: list[int] = []
    log_batch = MlflowClient.log_batch

    def counted(self: MlflowClient, run_id: str, metrics: Any = (), params: Any = (), **rest: Any) -> Any:
        if metrics or params:
            sizes.append(len(metrics))
        return log_batch(self, run_id, metrics=metrics, params=params, **rest)

    monkeypatch.setattr(MlflowClient, "log_batch", counted)
    finished_run(tmp_path, rounds=100, tracker=MLflowTracker(flush_seconds=60))
    assert len(sizes) <= 3  # params, rounds, results
    assert len(client.get_metric_history(last_run(client).info.run_id, "train/loss")) == 100
    (tmp_path / CONFIRMED).write_text(json.dumps({"run_id": last_run(client).info.run_id, "round": 0}))
    Mirror(tmp_path).sync()  # the folder has forgotten: the store is asked
    assert len(client.get_metric_history(last_run(client).info.run_id, "train/loss")) == 100
    calls = len(sizes)
    Mirror(tmp_path).sync()
    assert len(sizes) == calls


def test_params_are_flat_and_as_typed(tmp_path: Path) -> None:
    config = run_info(tmp_path).config | {"training": {"clip_norm": None, "drop_last": False}}
    params = flat_params(config)
    assert params["dataset.mean"] == "[0.1307]" and params["dataset.path"] == "null"
    assert params["training.drop_last"] == "false" and params["partition.name"] == "iid"
    assert not [key for key in params if "_target_" in key or key.startswith("loggers")]


def test_the_environment_names_another_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def refuse(uri: str, experiment: str) -> Any:
        opened.append(uri)
        raise UserError("seen")

    monkeypatch.setattr(mirror, "open_store", refuse)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    for tracker in (MLflowTracker(), MLflowTracker(tracking_uri="sqlite:///mine.db")):
        with pytest.raises(UserError, match="seen"):
            tracker.start(run_info(tmp_path))
    assert opened == ["http://127.0.0.1:1", "sqlite:///mine.db"]


def test_artifacts_of_a_server_are_the_servers_choice_and_others_are_beside_the_store() -> None:
    assert store.artifact_location("http://127.0.0.1:5000") is None
    beside = store.artifact_location("sqlite:////elsewhere/a.db")
    assert beside == "file:///elsewhere/outputs/mlflow-artifacts"


def test_a_store_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "no.db").write_text("this is no database, but it is long enough to look like a file of one")
    with pytest.raises(
        UserError, match=r"loggers.mlflow: the tracking store .* cannot be used .* logger=csv"
    ):
        MLflowTracker(tracking_uri=f"sqlite:///{tmp_path / 'no.db'}").start(run_info(tmp_path))


def test_a_file_of_the_run_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / ".mlflow.lock").mkdir()
    with pytest.raises(UserError, match=rf"\({tmp_path}/\.mlflow\.lock: .* a directory\)"), store_needed("x"):
        Mirror(tmp_path).sync()


def test_bad_options_are_refused() -> None:
    with pytest.raises(UserError, match="loggers.mlflow.flush_seconds=0"):
        MLflowTracker(flush_seconds=0)


def test_two_processes_make_one_store_at_once(tmp_path: Path) -> None:
    import mlflow  # noqa: F401  (imported before the fork: the children start at the same moment)

    uri = f"sqlite:///{tmp_path / 'new.db'}"
    together = multiprocessing.get_context("fork")
    barrier, answers = together.Barrier(2), together.Queue()

    def make() -> None:
        barrier.wait()
        answers.put(store.open_store(uri, "e")[1])

    both = [together.Process(target=make) for _ in range(2)]
    for process in both:
        process.start()
    assert answers.get(timeout=60) == answers.get(timeout=60)
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]


def test_a_run_names_the_commit_of_its_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page, "git", lambda *words: "a" * 40 if "rev-parse" in words else "")
    found = page.source_tags()
    assert found["mlflow.source.git.commit"] == "a" * 40 and found["uncommitted_changes"] == "false"
    monkeypatch.undo()
    monkeypatch.setattr(paths, "project_root", lambda: tmp_path)  # no clone
    assert "uncommitted_changes" not in page.source_tags()


def test_the_description_of_a_large_sweep_is_cut(tmp_path: Path) -> None:
    jobs = {f"dataset=cifar100,method=fedspa,seed={number}": "personal 55.5 %" for number in range(189)}
    note = sweep_run.Parent("id", outcomes=jobs).note()
    assert len(note) < 5000
    shown = note.count("personal 55.5")
    assert note.endswith(f"And {189 - shown} more.") and shown > 50
