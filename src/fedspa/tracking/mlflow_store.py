"""A run in MLflow: settings as params, curves as metrics by round, the folder's files as artifacts.

The client is used without MLflow's global "active run", so that runs in one process cannot mix. Metrics are
buffered, since a call for each point is 25 times slower than a batch every ten rounds. Metric names are
`group/name`: the run page draws a section a group (global, personal, local, train, cost, faults, time, final).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspa.errors import UserError, check_range
from fedspa.paths import project_root
from fedspa.records import RoundRecord, RunInfo, RunResult

if TYPE_CHECKING:
    from mlflow import MlflowClient

SMALL_FILES = ("*.yaml", "*.csv", "*.json", "*.png")
PARAM_LENGTH = 500
METRICS_A_CALL, PARAMS_A_CALL = 1000, 100
"""MLflow's own limits on one batch."""
PARENT = "mlflow.parentRunId"
"""The tag that nests a run below another."""


@dataclass(kw_only=True)
class MLflowTracker:
    """Follows a run in a tracking store; beside a database, artifacts go to outputs/mlflow-artifacts."""

    name: str = "mlflow"
    experiment: str = "fedspa"
    tracking_uri: str | None = None
    """null: the environment's MLFLOW_TRACKING_URI, else mlflow.db in the project's root."""
    flush_rounds: int = 10
    flush_seconds: float = 5.0
    """The buffer is sent once it holds so many rounds, or so much time after the last time."""
    parent_run_id: str | None = None
    """The run of the sweep that this run belongs to; set by the sweep."""

    def __post_init__(self) -> None:
        check_range("loggers.mlflow.flush_rounds", self.flush_rounds, low=1)
        check_range("loggers.mlflow.flush_seconds", self.flush_seconds, low=0)
        self._run_id = ""
        self._buffer: list[tuple[dict[str, float], int, int]] = []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def start(self, info: RunInfo) -> None:
        self._info = info
        self._client, self._experiment_id = self.open_store()
        tags = _tags(info) | ({PARENT: self.parent_run_id} if self.parent_run_id else {})
        run = self._client.create_run(
            self._experiment_id, run_name=str(info.config.get("name", "run")), tags=tags
        )
        self._run_id, self._flushed = run.info.run_id, time.monotonic()
        self._log_params(info.config)

    def open_store(self) -> tuple[MlflowClient, str]:
        """A client of the tracking store, and the experiment's id. Raises `UserError` if there is none to be had."""
        return _open_store(self._uri, self.experiment)

    @property
    def _uri(self) -> str:
        return self.tracking_uri or store_uri()

    def round(self, record: RoundRecord) -> None:
        self._buffer.append((_round_metrics(record), record.round, _now()))
        waited = time.monotonic() - self._flushed
        if len(self._buffer) >= self.flush_rounds or waited >= self.flush_seconds:
            self._flush()

    def finish(self, result: RunResult) -> None:
        self._buffer.append((_final_metrics(result.summary), self._info.rounds, _now()))
        self._deliver()
        self._end("FINISHED")
        print(f"In MLflow: {self._where()}")

    def abort(self, status: str, reason: str) -> None:
        if not self._run_id:
            return
        try:
            self._client.set_tag(self._run_id, "ended_because", reason)
            self._deliver()
        finally:
            self._end(status)

    def _log_params(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(key, value) for key, value in flat_params(config).items()]
        for part in _parts(params, PARAMS_A_CALL):
            self._client.log_batch(self._run_id, params=part)

    def _flush(self) -> None:
        from mlflow.entities import Metric

        points = [
            Metric(key, value, timestamp, step)
            for metrics, step, timestamp in self._buffer
            for key, value in metrics.items()
        ]
        for part in _parts(points, METRICS_A_CALL):
            self._client.log_batch(self._run_id, metrics=part)
        self._buffer, self._flushed = [], time.monotonic()

    def _deliver(self) -> None:
        self._flush()
        for pattern in (*SMALL_FILES, *(["*.safetensors"] if self._upload_weights else [])):
            for file in sorted(self._info.folder.glob(pattern)):
                self._client.log_artifact(self._run_id, str(file))

    def _end(self, status: str) -> None:
        self._client.set_terminated(self._run_id, status)
        self._run_id = ""

    @property
    def _upload_weights(self) -> bool:
        return bool(self._info.config.get("save", {}).get("upload_weights", False))

    def _where(self) -> str:
        if self._uri.startswith("http"):
            return f"{self._uri.rstrip('/')}/#/experiments/{self._experiment_id}"
        if self._uri == _default_uri():
            return f"run `mlflow ui` in {project_root()}"
        return f"run `mlflow ui --backend-store-uri {self._uri}`"


def flat_params(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The config as MLflow params: dotted keys, values as one would type them, at most 500 characters.

    Left out: `_target_` (the name says it) and the loggers (they change nothing in a run).
    """
    params: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            params |= {} if prefix + key == "loggers" else flat_params(value, f"{prefix}{key}.")
        elif key != "_target_":
            text = value if isinstance(value, str) else json.dumps(value)
            params[prefix + key] = text[:PARAM_LENGTH]
    return params


def _tags(info: RunInfo) -> dict[str, str]:
    facts = {
        **info.names,
        "seed": info.seed,
        "sparsity": info.sparsity,
        "config_hash": info.config_hash,
        "partition_hash": info.partition_hash,
        "version": info.version,
    }
    clients, images = len(info.label_counts), int(info.label_counts.sum())
    note = (
        f"{info.names.get('method')} with mask {info.names.get('mask')} at sparsity {info.sparsity} on "
        f"{info.names.get('dataset')} / {info.names.get('model')}: {info.rounds} rounds, {clients} clients "
        f"({info.names.get('partition')}) with {images} training images.\n\nFolder: `{info.folder}`"
    )
    return {key: str(value) for key, value in facts.items()} | {"mlflow.note.content": note}


def _round_metrics(record: RoundRecord) -> dict[str, float]:
    total, dense = record.total_costs, record.dense_costs
    return {
        **{
            f"{kind}/{metric}_{statistic}": float(value)
            for kind, spreads in record.scores.items()
            for metric, spread in spreads.items()
            for statistic, value in asdict(spread).items()
        },
        **({} if record.loss is None else {"train/loss": record.loss}),
        "train/learning_rate": record.learning_rate,
        "train/samples": float(record.samples),
        "train/participants": float(len(record.participants)),
        **{f"train/{name}": value for name, value in record.extras.items()},
        "cost/traffic_down_bytes": float(total.down_bytes),
        "cost/traffic_up_bytes": float(total.up_bytes),
        "cost/traffic_masks_bytes": float(total.mask_bytes),
        "cost/traffic_total_bytes": float(total.traffic_bytes),
        **({"cost/traffic_encoded_bytes": float(total.encoded_bytes)} if total.encoded_bytes else {}),
        "cost/traffic_dense_bytes": float(dense.traffic_bytes),
        "cost/flops_train": total.train_flops,
        "cost/flops_search": total.search_flops,
        "cost/flops_total": total.flops,
        "cost/flops_dense": dense.flops,
        **{f"faults/{kind}": float(count) for kind, count in record.total_events.items()},
        **{f"time/{phase}_s": seconds for phase, seconds in record.seconds.items()},
    }


def _final_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The headline numbers of a run, for the columns of MLflow's table of runs."""
    metrics = {"final/samples_per_s": float(summary["samples_per_s"])}
    for kind, spread in summary["accuracy"].items():
        if spread:
            metrics[f"final/{kind}_accuracy"] = float(spread["mean"])
            metrics[f"final/{kind}_worst_decile"] = float(spread["worst_decile"])
    for kind, rounds in summary["rounds_to_accuracy"].items():
        for target, first in (rounds or {}).items():
            if first is not None:
                metrics[f"final/{kind}_rounds_to_{target}"] = float(first)
    return metrics


def store_uri() -> str:
    """The tracking store unless a run's config names another."""
    return os.environ.get("MLFLOW_TRACKING_URI") or _default_uri()


def _default_uri() -> str:
    return f"sqlite:///{project_root() / 'mlflow.db'}"


def _open_store(uri: str, experiment: str) -> tuple[MlflowClient, str]:
    """A client of the store and the experiment's id; both are made where they do not exist yet.

    Raises `UserError` if the store cannot be had.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # else a page of lines on the new tables
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        with _one_process_at_a_time(uri):
            client = MlflowClient(tracking_uri=uri)
            if found := client.get_experiment_by_name(experiment):
                return client, found.experiment_id
            return client, client.create_experiment(experiment, artifact_location=_artifact_location(uri))
    except (MlflowException, SQLAlchemyError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"loggers.mlflow: the tracking store {uri} cannot be used ({reason}): "
            "mend it, name another with loggers.mlflow.tracking_uri=..., or run with logger=csv."
        ) from error


def _artifact_location(uri: str) -> str | None:
    """A server decides itself; with a database MLflow would take the current directory, whatever it is."""
    if "://" in uri and uri.split("://")[0] in ("http", "https", "databricks"):
        return None
    return (project_root() / "outputs" / "mlflow-artifacts").as_uri()


@contextmanager
def _one_process_at_a_time(uri: str) -> Iterator[None]:
    """Processes that create the tables of one SQLite file at the same moment crash: they take turns here."""
    from filelock import FileLock

    if not uri.startswith("sqlite:///"):
        yield
        return
    database = Path(uri.removeprefix("sqlite:///"))
    database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{database}.lock"):
        yield


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _now() -> int:
    """MLflow's timestamps are milliseconds since 1970."""
    return round(time.time() * 1000)
