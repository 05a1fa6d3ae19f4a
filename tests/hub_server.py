"""A small stand-in of the Hugging Face hub's HTTP interface on 127.0.0.1, with failures to order."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest


@dataclass
class Repository:
    """A data set: its commits, the newest last, each a dict from path to content."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gate: int | None = None
    """401 or 403: whoever asks is refused."""

    @property
    def newest(self) -> str:
        return list(self.commits)[-1]


@dataclass
class Hub:
    """What the server has, what it was asked for, and how it is to fail."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=lambda: defaultdict(Repository))
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and Range header of each request."""
    failures: dict[str, list[int]] = field(default_factory=dict)
    """By a part of the path: what each of the next requests for it gets. A status is answered; -n closes the
    connection after n bytes of the content; 0 is no failure."""

    def publish(self, name: str, files: dict[str, bytes]) -> str:
        """A new commit of a data set; returns its hash."""
        content = b"".join(path.encode() + data for path, data in sorted(files.items()))
        commit = hashlib.sha1(name.encode() + content).hexdigest()
        self.repositories[name].commits[commit] = files
        return commit

    def downloads(self, file: str) -> list[str | None]:
        """The Range header of each GET for a file."""
        return [sent for method, path, sent in self.asked if method == "GET" and path.endswith(f"/{file}")]


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer()

    def answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        failure = next((self.hub.failures[part] for part in self.hub.failures if part in path), [])
        order = failure.pop(0) if failure and self.command != "HEAD" else 0
        if order > 0:
            return self.refuse(order, "Injected")
        parts = path.strip("/").split("/")
        if parts == ["api", "datasets"]:
            author = parse_qs(url.query).get("author", [""])[0]
            names = [name for name in self.hub.repositories if name.startswith(f"{author}/")]
            return self.json([{"id": name, "sha": self.hub.repositories[name].newest} for name in names])
        if parts[:2] == ["api", "datasets"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
        elif parts[0] == "datasets":
            name, rest = "/".join(parts[1:3]), parts[3:]
        else:
            return self.refuse(404, "EntryNotFound")
        if name not in self.hub.repositories:
            return self.refuse(401, "RepoNotFound")
        repository = self.hub.repositories[name]
        if repository.gate:
            return self.refuse(repository.gate, "GatedRepo")
        revision = rest[1] if len(rest) > 1 else "main"
        commit = repository.newest if revision == "main" else revision
        if commit not in repository.commits:
            return self.refuse(404, "RevisionNotFound")
        files = repository.commits[commit]
        match rest[:1]:
            case [] | ["revision"]:
                siblings = [{"rfilename": file} for file in files]
                return self.json({"id": name, "sha": commit, "siblings": siblings, "private": False})
            case ["tree"]:
                return self.tree(files, "/".join(rest[2:]), "recursive=true" in url.query.lower())
            case ["paths-info"]:
                wanted = json.loads(self.body)["paths"]
                return self.json([entry(file, files[file]) for file in wanted if file in files])
            case ["resolve"]:
                file = "/".join(rest[2:])
                return (
                    self.file(files[file], commit, order)
                    if file in files
                    else self.refuse(404, "EntryNotFound")
                )
        return self.refuse(404, "EntryNotFound")

    def tree(self, files: dict[str, bytes], folder: str, recursive: bool) -> None:
        inside = {file: data for file, data in files.items() if not folder or file.startswith(f"{folder}/")}
        if folder and not inside:
            return self.refuse(404, "EntryNotFound")
        found: dict[str, dict[str, Any]] = {}
        for file, data in inside.items():
            levels = file.split("/")
            for depth in range(len(folder.split("/")) + 1 if folder else 1, len(levels)):
                parent = "/".join(levels[:depth])
                found[parent] = {"type": "directory", "path": parent, "oid": "0" * 40, "size": 0}
            found[file] = entry(file, data)
        start = len(folder) + 1 if folder else 0
        return self.json([e for path, e in found.items() if recursive or "/" not in path[start:]])

    def file(self, data: bytes, commit: str, cut: int) -> None:
        first = int((self.headers.get("Range") or "bytes=0-")[len("bytes=") :].split("-")[0])
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(data) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[first : first - cut] if cut else data[first:])

    def json(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"{code} {status}")
        self.send_header("Content-Length", "0")
        self.end_headers()


def entry(file: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextmanager
def served() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """What makes another process use the stand-in, and caches of its own."""
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}


def redirect(monkeypatch: pytest.MonkeyPatch, hub: Hub, home: Path) -> None:
    """The same in this process, whose libraries have read their environment already."""
    import datasets
    from huggingface_hub import constants

    for module, name, value in (
        (constants, "ENDPOINT", hub.url),
        (constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"),
        (constants, "HF_HUB_CACHE", str(home / "hub")),
        (constants, "HF_HUB_OFFLINE", False),
        (datasets.config, "HF_ENDPOINT", hub.url),
        (datasets.config, "HF_DATASETS_CACHE", home / "datasets"),
        (datasets.config, "DOWNLOADED_DATASETS_PATH", home / "datasets/downloads"),
        (datasets.config, "HF_HUB_OFFLINE", False),
    ):
        monkeypatch.setattr(module, name, value)
