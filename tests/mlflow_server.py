"""A tracking server for tests: the part of MLflow's REST API that a run uses, in memory, able to misbehave.

It starts in milliseconds where `mlflow server` takes many seconds; runs live on while it is down.
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4


class TrackingServer:
    """`up()` and `down()` at will; no answer while `answering` is not set; `lost`: calls after which it hangs up;
    `guarded`: runs may be added to the experiment, but it may not be changed; `forbidden`: calls that are not;
    `unseen`: so many times the experiment is not found, as before another run makes it."""

    def __init__(self, artifacts: Path) -> None:
        self.artifacts = artifacts
        self.runs: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.experiment_tags: dict[str, str] = {}
        self.guarded = False
        self.lost: set[str] = set()
        self.answering = threading.Event()
        self.answering.set()
        self.forbidden: set[str] = set()
        self.experiment_stage, self.unseen = "active", 0
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self.up()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def run(self) -> dict[str, Any]:
        """The only run."""
        (run,) = self.runs.values()
        return run

    @property
    def uploads(self) -> Path:
        """The folder of the only run's artifacts."""
        return self.artifacts / self.run["info"]["run_id"]

    def steps(self, key: str) -> list[int]:
        """Steps of a metric of the only run, in the order of arrival, doubled ones included."""
        return [point["step"] for point in self.run["points"] if point["key"] == key]

    def up(self) -> None:
        if self._server is None:
            handler = type("Handler", (_Handler,), {"store": self})
            self._server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
            self._server.daemon_threads = True
            self._port = self._server.server_address[1]
            threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def down(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, call: str, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(call)
        run = self.runs.get(str(body.get("run_id")), {})
        if call == "experiments/get-by-name":
            if self.unseen:
                self.unseen -= 1
                raise KeyError(f"no experiment {body['experiment_name']}")
            known = {"experiment_id": "1", "name": body["experiment_name"]}
            return {"experiment": known | {"lifecycle_stage": self.experiment_stage}}
        if call == "experiments/create":
            raise FileExistsError(f"Experiment(name={body['name']}) already exists.")
        if call == "experiments/set-experiment-tag":
            if self.guarded:
                raise PermissionError("Permission denied")
            self.experiment_tags[body["key"]] = body["value"]
            return {}
        if call == "runs/create":
            run_id = uuid4().hex  # MLflow remembers where a run's artifacts go, whatever the store
            info = {
                **{"run_id": run_id, "run_uuid": run_id, "experiment_id": "1", "status": "RUNNING"},
                **{"lifecycle_stage": "active", "artifact_uri": (self.artifacts / run_id).as_uri()},
                **{"start_time": body.get("start_time", 0), "run_name": body.get("run_name", "")},
            }
            tags = {tag["key"]: tag["value"] for tag in body.get("tags", [])}
            self.runs[run_id] = {"info": info, "points": [], "params": {}, "tags": tags}
            return {"run": self._shown(self.runs[run_id])}
        if call == "runs/search":  # by the value of a tag
            wanted = body["filter"].split("'")[1]
            return {
                "runs": [self._shown(one) for one in self.runs.values() if wanted in one["tags"].values()]
            }
        if not run:
            raise KeyError(f"no run {body.get('run_id')}")
        if call in self.forbidden:
            raise PermissionError(f"{call} is forbidden")
        if call == "runs/log-batch":
            self._validate(run, body.get("metrics", []))
            run["points"] += body.get("metrics", [])
            for several in ("params", "tags"):
                run[several] |= {one["key"]: one["value"] for one in body.get(several, [])}
        elif call == "runs/log-inputs":
            run["inputs"] = body.get("datasets", [])
        elif call == "runs/delete-tag":
            del run["tags"][body["key"]]
        elif call == "runs/update":
            run["info"] |= {key: body[key] for key in ("status", "end_time") if key in body}
            return {"run_info": run["info"]}
        elif call == "runs/get":
            return {"run": self._shown(run)}
        else:
            raise KeyError(f"no call {call}")
        return {}

    def _validate(self, run: dict[str, Any], metrics: list[dict[str, Any]]) -> None:
        """A batch is taken whole or not at all; a deleted run takes none."""
        if run["info"]["lifecycle_stage"] != "active":
            raise ValueError("The run must be in the 'active' state. Current state is deleted.")
        for metric in metrics:
            if not re.fullmatch(r"[/\w.\- :]*", metric["key"]):
                raise ValueError(f"Invalid metric name: '{metric['key']}'")

    def _shown(self, run: dict[str, Any]) -> dict[str, Any]:
        latest: dict[str, dict[str, Any]] = {}
        for point in run["points"]:
            if point["step"] >= latest.get(point["key"], point)["step"]:
                latest[point["key"]] = point
        tags = [{"key": key, "value": value} for key, value in run["tags"].items()]
        params = [{"key": key, "value": value} for key, value in run["params"].items()]
        data = {"metrics": list(latest.values()), "tags": tags, "params": params}
        return {"info": run["info"], "data": data, "inputs": {"dataset_inputs": run.get("inputs", [])}}


class _Handler(BaseHTTPRequestHandler):
    store: TrackingServer

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        self._answer({key: values[0] for key, values in query.items()})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        self.store.answering.wait()
        call = urlsplit(self.path).path.partition("/mlflow/")[2]
        try:
            code, answer = 200, self.store.answer(call, body)
        except KeyError as error:
            code, answer = 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": str(error)}
        except FileExistsError as error:
            code, answer = 400, {"error_code": "RESOURCE_ALREADY_EXISTS", "message": str(error)}
        except ValueError as error:
            code, answer = 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": str(error)}
        except PermissionError as error:
            code, answer = 403, {"error_code": "PERMISSION_DENIED", "message": str(error)}
        if call in self.store.lost:
            self.close_connection = True
            return
        content = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""
