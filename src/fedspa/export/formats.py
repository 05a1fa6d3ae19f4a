"""Writes a model to bytes in each format."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import NamedTuple

import torch
from safetensors.torch import save

from fedspa.core.errors import UserError, brief
from fedspa.export.client_model import ClientModel

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4
"""The largest difference between the logits of two float32 computations, relative to the largest logit (at least 1)."""
CHECKED = 8


class Encoded(NamedTuple):
    """A model as bytes."""

    data: bytes
    remark: str = ""
    """A line about the check of the model."""


def as_torch(model: ClientModel) -> Encoded:
    """A program of `torch.export`, for any number of examples.

    Raises `UserError` if torch cannot trace the network.
    """
    try:
        with _quiet():
            batch = {0: torch.export.Dim("batch")}
            program = torch.export.export(model.module, (model.inputs(2),), dynamic_shapes=(batch,))
    except Exception as error:  # any error of torch with a user's network
        raise UserError(
            f"format=torch cannot follow what the network computes ({brief(error)}): use format=safetensors."
        ) from error
    file = io.BytesIO()
    with _quiet():
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
    return Encoded(file.getvalue(), _checked(model, "torch", "torch", loaded))


def as_safetensors(model: ClientModel) -> Encoded:
    """The module's `state_dict`. The file's metadata describe the network and its active values."""
    sizes = zip(model.space.names, model.active, model.space.sizes, strict=True)
    facts = {
        "class": model.make,
        "arguments": json.dumps(model.arguments),
        "batchnorm": model.batchnorm or "",
        "class_names": json.dumps(model.class_names),
        **{name: json.dumps(values) for name, values in model.source.normaliser().items()},
        "input_shape": json.dumps(model.source.input_shape),
        "density": json.dumps(model.density),
        **({} if model.alpha is None else {"alpha": json.dumps(model.alpha)}),
        "densities": json.dumps({name: active / size for name, active, size in sizes}),
    }
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.module.state_dict().items()}
    return Encoded(save(tensors, facts))


def as_onnx(model: ClientModel) -> Encoded:
    """An ONNX graph from `inputs` to `logits`, for any number of examples, checked with onnxruntime.

    Raises `UserError` if a package is missing, if the graph cannot be made, or if its logits differ.
    """
    require_onnx()
    import onnxruntime

    try:
        with _quiet():
            made = torch.onnx.export(
                model.module, (model.inputs(2),), dynamic_shapes=({0: "batch"},),
                input_names=["inputs"], output_names=["logits"], dynamo=True, verbose=False,
            )  # fmt: skip
        assert made is not None
        data = made.model_proto.SerializeToString()
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    except Exception as error:  # any error of the exporter or the runtime
        raise UserError(
            f"format=onnx cannot hold this network ({brief(error)}): use format=torch or safetensors."
        ) from error

    def computed(inputs: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run(None, {"inputs": inputs.numpy()})[0])

    return Encoded(data, _checked(model, "onnx", "onnxruntime", computed))


FORMATS: dict[str, Callable[[ClientModel], Encoded]] = {
    "torch": as_torch,
    "safetensors": as_safetensors,
    "onnx": as_onnx,
}


def require_onnx() -> None:
    """Raise `UserError` unless all packages for format=onnx are installed."""
    for package in ONNX_PACKAGES:
        try:
            import_module(package)
        except ImportError as error:
            raise UserError(
                f"format=onnx needs {package}, which cannot be imported ({brief(error)}): pip install 'fedspa[onnx]'."
            ) from error


def _checked(model: ClientModel, format: str, by: str, other: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """A line about the difference between the logits of `other` and the model's. Raises `UserError` if it is too
    large."""
    inputs = model.inputs(CHECKED)
    with torch.no_grad():
        wanted = model.module(inputs)
        difference = float((wanted - other(inputs)).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(wanted.abs().max())):
        raise UserError(
            f"format={format} makes other logits of this network (they differ by {difference:.1g}), so nothing was "
            "written: use format=safetensors."
        )
    return f"Checked with {by} on {CHECKED} random inputs: logits differ by at most {difference:.1g}"


@contextmanager
def _quiet() -> Iterator[None]:
    """A context that hides the exporters' own messages."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
