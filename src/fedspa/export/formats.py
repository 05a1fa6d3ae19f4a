"""The bytes of a model in each format."""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

from fedspa.core.errors import UserError, brief
from fedspa.core.randomness import generator
from fedspa.export.client_model import ClientModel

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4
"""How far logits of two ways to compute a model in float32 may lie apart, relative to the largest one (at least 1)."""
CHECKED_IMAGES = 8


class Encoded(NamedTuple):
    """A model as bytes."""

    data: bytes
    remark: str = ""
    """How it was checked, in a line."""


def as_torch(model: ClientModel) -> Encoded:
    """A program of `torch.export`, for any number of images.

    Raises `UserError` where torch cannot follow the network.
    """
    program = _program(model, "torch")
    file = io.BytesIO()
    with _quiet():
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
    difference = _compared(model, "torch", lambda images: loaded(images))
    return Encoded(file.getvalue(), _checked("torch", difference))


def as_safetensors(model: ClientModel) -> Encoded:
    """The module's `state_dict`; the file's metadata say how to make the network and what is active."""
    sizes = zip(model.space.names, model.active, model.space.sizes, strict=True)
    facts = {
        "class": model.make,
        "arguments": json.dumps(model.arguments),
        "batchnorm": model.batchnorm or "",
        "class_names": json.dumps(model.class_names),
        "mean": json.dumps(model.mean),
        "std": json.dumps(model.std),
        "image_shape": json.dumps(model.image_shape),
        "density": json.dumps(model.density),
        "densities": json.dumps({name: active / size for name, active, size in sizes}),
    }
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.module.state_dict().items()}
    return Encoded(save(tensors, facts))


def as_onnx(model: ClientModel) -> Encoded:
    """An ONNX graph `images` to `logits`, for any number of images, of which onnxruntime makes the same logits.

    Raises `UserError` where a package is missing, where it cannot be made, or where the logits are others.
    """
    require_onnx()
    import onnxruntime

    program = _program(model, "onnx")
    try:
        with _quiet():
            made = torch.onnx.export(
                program, input_names=["images"], output_names=["logits"], dynamo=True, verbose=False
            )
        assert made is not None
        data = _with_axis(made.model_proto, "batch").SerializeToString()
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    except Exception as error:  # whatever exporter and runtime make of a network of others
        raise UserError(
            f"format=onnx cannot hold this network ({brief(error)}): use format=torch or safetensors."
        ) from error
    difference = _compared(
        model, "onnx", lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    )
    return Encoded(data, _checked("onnxruntime", difference))


FORMATS: dict[str, Callable[[ClientModel], Encoded]] = {
    "torch": as_torch,
    "safetensors": as_safetensors,
    "onnx": as_onnx,
}


def _with_axis(graph: Any, name: str) -> Any:
    """An ONNX model (`ModelProto`) whose axis of images has this name; torch calls it s31 or the like."""
    given = graph.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.graph.input, *graph.graph.output, *graph.graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param:  # perhaps a product, as 64*s31
                axis.dim_param = re.sub(rf"\b{re.escape(given)}\b", name, axis.dim_param)
    return graph


def require_onnx() -> None:
    """Raise `UserError` unless what format=onnx needs is installed."""
    for package in ONNX_PACKAGES:
        try:
            import_module(package)
        except ImportError as error:
            raise UserError(
                f"format=onnx needs {package}, which cannot be imported ({brief(error)}): pip install 'fedspa[onnx]'."
            ) from error


def _checked(by: str, difference: float) -> str:
    return f"Checked with {by} on {CHECKED_IMAGES} random images: logits differ by at most {difference:.1g}"


def _program(model: ClientModel, format: str) -> torch.export.ExportedProgram:
    images = _images(model, 2)
    try:
        with _quiet():
            return torch.export.export(
                model.module, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},)
            )
    except Exception as error:  # whatever torch makes of a network of others
        raise UserError(
            f"format={format} cannot follow what the network computes ({brief(error)}): use format=safetensors."
        ) from error


def _images(model: ClientModel, count: int) -> torch.Tensor:
    """Random pixels in [0, 1]: float32 [count, C, H, W]."""
    return torch.rand(count, *model.image_shape, generator=generator(0, "export_check"))


def _compared(model: ClientModel, format: str, other: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The largest difference to the logits of `other`. Raises `UserError` for one that is no rounding."""
    images = _images(model, CHECKED_IMAGES)
    with torch.no_grad():
        wanted, got = model.module(images), other(images)
        difference = float((wanted - got).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(wanted.abs().max())):
        raise UserError(
            f"format={format} makes other logits of this network (they differ by {difference:.1g}), so nothing was "
            "written: use format=safetensors."
        )
    return difference


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters say of their own insides."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
