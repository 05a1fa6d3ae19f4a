"""The command line of export.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedspa.core.errors import UserError, check_choice
from fedspa.core.key_values import key_values

KEYS = ("run", "client", "format", "model", "out")
MODELS = ("personal", "local", "global")
SUFFIXES = {"torch": ".pt2", "safetensors": ".safetensors", "onnx": ".onnx"}
"""How the file's name ends, by format."""


@dataclass(frozen=True)
class Options:
    """Which model to write, and how."""

    run: str
    client: int | None
    """None only for a global model that is everybody's."""
    format: str
    model: str = "personal"
    out: Path | None = None

    @property
    def file_name(self) -> str:
        """That of the file unless `out` says otherwise."""
        whose = "" if self.client is None else f"client{self.client}-"
        return f"{whose}{self.model}{SUFFIXES[self.format]}"


def parse(arguments: list[str]) -> Options:
    """Read `key=value` arguments. Raises `UserError` for the first mistake."""
    given = key_values(arguments, KEYS)
    if "run" not in given:
        raise UserError("Say which run the model is of: run=<a run's folder, or its id in MLflow>.")
    if "format" not in given:
        raise UserError(f"Say how to write the model: format={', '.join(SUFFIXES)}.")
    kind, model = given["format"], given.get("model", "personal")
    check_choice("format", kind, SUFFIXES)
    check_choice("model", model, MODELS)
    client = _client(given["client"]) if "client" in given else None
    if client is None and model != "global":
        raise UserError(f"Say whose model={model} to write: client=<number, from 0>.")
    return Options(given["run"], client, kind, model, _out(given["out"], kind) if "out" in given else None)


def _client(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"client={text} is not a client's number: they are counted from 0.")
    return int(text)


def _out(text: str, kind: str) -> Path:
    out, suffix = Path(text), SUFFIXES[kind]
    if out.suffix != suffix:
        raise UserError(f"out={text} does not end as files of format={kind} do: name it {out.stem}{suffix}.")
    return out
