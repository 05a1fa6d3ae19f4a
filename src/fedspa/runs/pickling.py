"""Values and exceptions as bytes, for another process of the run."""

from __future__ import annotations

import io
import pickle
import traceback
from typing import Any

import numpy as np
import torch


def pack(value: Any) -> bytes:
    """The pickled value, with each tensor once and by value.

    Torch's own pickling uses shared memory and keeps a file open for each tensor. A thousand clients' states would
    then need more open files than most systems allow.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """A packed value. Its tensors from a GPU are on this process's GPU."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return _tensor, (item.cpu().numpy(), item.device.type)
        return NotImplemented


def _tensor(values: np.ndarray, device: str) -> torch.Tensor:
    return torch.from_numpy(values).to(device)


def portable(error: BaseException, where: str) -> BaseException:
    """The error with a note about its place; a `RuntimeError` with the same text if it cannot be pickled.

    `where`: the name of the process, such as "rank 1".
    """
    place = f"In {where}:\n" + "".join(traceback.format_tb(error.__traceback__))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    error.add_note(place)
    return error
