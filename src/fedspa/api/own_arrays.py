"""The user's arrays and tensors as sets of examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedspa.core.errors import UserError
from fedspa.data.sets import ArraySet


def array_set(where: str, pair: Any) -> ArraySet:
    """Arrays or tensors as examples. Raises `UserError` if they cannot be trained on. `where`: the argument's name."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UserError(
            f"{where} must be a pair (inputs, targets) of arrays or tensors, each with a row an example."
        )
    inputs, targets = (
        _tensor(f"{name} of {where}", v) for name, v in zip(("inputs", "targets"), pair, strict=True)
    )
    if len(inputs) != len(targets) or not len(inputs):
        raise UserError(
            f"{where} has {len(inputs)} rows of inputs and {len(targets)} targets: it needs a target for each row, "
            "and one row at least."
        )
    for name, tensor in (("inputs", inputs), ("targets", targets)):
        if tensor.is_floating_point() and len(bad := (~tensor.flatten(1).isfinite().all(1)).nonzero()):
            raise UserError(
                f"{name} of {where} have a value that is not finite in row {int(bad[0])} (from 0), and {len(bad)} such "
                "rows in all: leave them out, or fill them in."
            )
    if inputs.dtype == torch.uint8 and inputs.ndim != 4:
        inputs = inputs.float() / 255
    if targets.is_floating_point():
        return ArraySet(inputs, targets.flatten(1))
    if targets.numel() != len(targets):
        raise UserError(
            f"targets of {where} are integers of shape {list(targets.shape)}: classes are [{len(targets)}], and "
            "numbers to predict are floats."
        )
    if int(targets.min()) < 0:
        raise UserError(f"targets of {where} have class {int(targets.min())}: classes are counted from 0.")
    return ArraySet(inputs, targets.flatten().long())


def _tensor(where: str, values: Any) -> torch.Tensor:
    """A tensor on the CPU, [N, ...] with at least two dimensions: floats, int64 or uint8."""
    if isinstance(values, torch.Tensor) and values.dtype == torch.bfloat16:
        values = values.float()  # NumPy has no bfloat16
    array = as_array(where, values)
    if array.dtype.kind not in "biuf":
        raise UserError(
            f"{where} have dtype {array.dtype}: they must be numbers, as np.unique(names, return_inverse=True)[1] "
            "makes of names."
        )
    if array.ndim == 0:
        raise UserError(f"{where} are one number: they must be rows of numbers.")
    kind: np.dtype = np.dtype("u1" if array.dtype == np.uint8 else "i8")
    if array.dtype.kind == "f":  # torch takes the native byte order only
        kind = np.dtype("f8") if array.itemsize > 8 else array.dtype.newbyteorder("=")
    tensor = torch.from_numpy(np.array(array, dtype=kind))
    return tensor.reshape(len(tensor), *(tensor.shape[1:] or (1,)))


def as_array(where: str, values: Any) -> np.ndarray:
    """Lists, arrays and dense tensors as an array. Raises `UserError` for anything else."""
    try:
        return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{where} cannot be made an array: lists must have equal lengths, and tensors must be dense."
        ) from error


def check_alike(train: ArraySet, test: ArraySet) -> None:
    """Raise `UserError` unless test and training set have the same kind of inputs and targets."""
    for name in ("inputs", "targets"):
        one, other = getattr(train, name), getattr(test, name)
        kinds = one.is_floating_point() == other.is_floating_point() and (one.dtype == torch.uint8) == (
            other.dtype == torch.uint8
        )
        if not kinds or one.shape[1:] != other.shape[1:]:
            shown = [f"{str(t.dtype).removeprefix('torch.')} {['N', *t.shape[1:]]}" for t in (one, other)]
            raise UserError(
                f"{name} of test are {shown[1]}, but those of data are {shown[0]}: they must be alike."
            )
