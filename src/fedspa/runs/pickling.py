"""Values and exceptions as bytes, for another process of the run."""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

APART = "cuda"
"""The type of device whose tensors can travel beside a packed value."""


def pack(value: Any, apart: list[torch.Tensor] | None = None) -> bytes:
    """The pickled value, with each tensor once and by value.

    `apart`: a list to which the tensors on a GPU are added instead.

    Torch's own pickling uses shared memory and keeps a file open for each tensor. A thousand clients' states would
    then need more open files than most systems allow.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, apart).dump(value)
    return buffer.getvalue()


def unpack(data: bytes, apart: Sequence[torch.Tensor] = ()) -> Any:
    """A packed value. Its tensors from a GPU are on this process's GPU. `apart`: those that travelled beside it."""
    return _Unpickler(io.BytesIO(data), apart).load()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, apart: list[torch.Tensor] | None) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._apart, self._places = apart, dict[int, int]()

    def persistent_id(self, item: Any) -> int | None:
        """The place of a tensor that travels apart; None for any other object."""
        if self._apart is None or not isinstance(item, torch.Tensor) or item.device.type != APART:
            return None
        if id(item) not in self._places:
            self._places[id(item)] = len(self._apart)
            self._apart.append(item)
        return self._places[id(item)]

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return _tensor, (item.cpu().numpy(), item.device.type)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, apart: Sequence[torch.Tensor]) -> None:
        super().__init__(buffer)
        self._apart = apart

    def persistent_load(self, place: int) -> torch.Tensor:
        return self._apart[place]


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
