"""Writing one model of a run, and telling what was written."""

from __future__ import annotations

from fedspa.core.errors import UserError, brief
from fedspa.core.files import write_whole
from fedspa.core.paths import project_root
from fedspa.export.client_model import ClientModel
from fedspa.export.formats import FORMATS, require_onnx
from fedspa.export.options import Options
from fedspa.export.runs import run_folder
from fedspa.export.stored_run import StoredRun


def export(options: Options) -> list[str]:
    """Write the model; returns what there is to say of it, in lines. Raises `UserError`."""
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
    channels, height, width = model.image_shape
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (model.mean, model.std))
    return [
        f"Takes pixels in [0, 1], float32 [batch, {channels}, {height}, {width}], and normalises them itself "
        f"(mean {mean}; std {std}); gives logits of {model.classes} classes",
        f"Active: {model.active_parameters:,} of {model.parameters:,} parameters, density {model.density:.4g}",
        f"Weights: {model.dense_bytes:,} bytes dense; {model.packed_bytes:,} packed"
        + (
            " (the same: none is inactive)"
            if model.packed_bytes == model.dense_bytes
            else " (the active values and one bit a weight)"
        ),
    ]
