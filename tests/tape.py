"""A stand-in for a CUDA graph on the CPU: the operations of one call, written down and played back on the same tensors.

As in a graph, nothing of the function's Python runs again: a number that was read while it was recorded stays what it
was, and a tensor that an attribute no longer names is still the one that is written to. What a capture forbids is
refused: reading a value back, and results whose shape depends on values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from fedspa.training.capture import WARM_UPS, Captures

FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "lift_fresh")


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        assert name not in FORBIDDEN, f"a capture forbids {name}"
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result


class TapeCaptures(Captures):
    """In place of `Captures`; `count` tells how many functions were recorded."""

    recorded = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        for _ in range(WARM_UPS):
            function()
        with _Recorder() as recorder:
            function()
        type(self).recorded += 1
        operations = recorder.operations
        assert operations

        @torch.no_grad()
        def replay() -> None:
            made: dict[int, torch.Tensor] = {}  # in place of the tensors that the recorded call made

            def now(tensor: torch.Tensor) -> torch.Tensor:
                return made.get(id(tensor), tensor)

            for func, args, kwargs, result in operations:
                again = func(
                    *tree_map_only(torch.Tensor, now, args), **tree_map_only(torch.Tensor, now, kwargs)
                )
                for old, new in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                    if isinstance(old, torch.Tensor):
                        made[id(old)] = new

        return replay
