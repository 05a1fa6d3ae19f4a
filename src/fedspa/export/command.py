"""The command line of export.py: chooses a run's model and its format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedspa.core.errors import UserError, brief, check_choice
from fedspa.core.files import write_whole
from fedspa.core.paths import project_root
from fedspa.export.runs import run_folder

if TYPE_CHECKING:
    from fedspa.export.client_model import ClientModel

MODELS = ("personal", "local", "global")
"""The kinds of model that can be rebuilt from a run's folder."""
SUFFIXES = {"torch": ".pt2", "safetensors": ".safetensors", "onnx": ".onnx"}
"""The ending of the file's name, by format."""


@dataclass
class Options:
    """The chosen model and its format."""

    run: str = ""
    client: int | None = None
    """From 0. None only for a global model that all clients share."""
    format: str = ""
    model: str = "personal"
    out: Path | None = None

    def __post_init__(self) -> None:
        if not self.run:
            raise UserError("Say which run the model is of: run=<a run's folder, or its id in MLflow>.")
        if not self.format:
            raise UserError(f"Say how to write the model: format={', '.join(SUFFIXES)}.")
        check_choice("format", self.format, SUFFIXES)
        check_choice("model", self.model, MODELS)
        if self.client is None and self.model != "global":
            raise UserError(f"Say whose model={self.model} to write: client=<number, from 0>.")
        if self.out and self.out.suffix != (suffix := SUFFIXES[self.format]):
            raise UserError(
                f"out={self.out} does not end as files of format={self.format} do: name it "
                f"{self.out.stem}{suffix}."
            )

    @property
    def file_name(self) -> str:
        """The file's name if `out` is not given."""
        whose = "" if self.client is None else f"client{self.client}-"
        return f"{whose}{self.model}{SUFFIXES[self.format]}"


def export(options: Options) -> list[str]:
    """Write the model; returns lines for the user. Raises `UserError`."""
    # Imported here because they load torch, which takes seconds: a mistake is reported before.
    from fedspa.export.formats import FORMATS, require_onnx
    from fedspa.export.stored_run import StoredRun

    if options.format == "onnx":
        require_onnx()
    folder = run_folder(options.run)
    model = StoredRun(folder).model(options.model, options.client)
    encoded = FORMATS[options.format](model)
    out = options.out or project_root() / "outputs" / "exports" / folder.resolve().name / options.file_name
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, encoded.data)
    except OSError as error:
        raise UserError(
            f"{out} cannot be written ({brief(error)}): give another file by out=<file>."
        ) from error
    whose = "" if options.client is None else f" of client {options.client}"
    return [
        f"The {options.model} model{whose} is {out} ({len(encoded.data):,} bytes)",
        *_facts(model),
        *([encoded.remark] if encoded.remark else []),
    ]


def _facts(model: ClientModel) -> list[str]:
    source = model.source
    shape = f"[batch, {', '.join(map(str, source.input_shape))}]"
    values = {name: ", ".join(f"{value:g}" for value in each) for name, each in source.normaliser().items()}
    if values:
        how = f"(mean {values['mean']}; std {values['std']})"
        takes = f"pixels in [0, 1], float32 {shape}, and normalises them itself {how}"
    else:
        takes = f"{'standardised inputs, float32' if source.input_dtype is None else 'tokens, int64'} {shape}"
    gives = (
        f"{source.outputs} standardised numbers"
        if source.is_regression
        else f"logits of {source.classes} classes"
    )
    return [
        f"Takes {takes}; gives {gives}",
        f"Active: {model.active_parameters:,} of {model.parameters:,} parameters, density {model.density:.4g}",
        f"Weights: {model.dense_bytes:,} bytes dense; {model.packed_bytes:,} packed"
        + (
            " (the same: none is inactive)"
            if model.packed_bytes == model.dense_bytes
            else " (the active values and one bit a weight)"
        ),
    ]
