"""Records functions as CUDA graphs and replays them. Without CUDA the functions themselves are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 3
"""Calls before the capture. In them compilers, cuDNN and cuBLAS set themselves up, which a capture forbids."""


class Captures:
    """Records the functions of one lane, to call them without the cost of their launches.

    The functions read and write tensors that stay in place.

    All graphs of a lane work in one memory pool of the size that the largest graph needs. So memory that a call
    allocates must not outlive the call, and two calls must not run at once. Warm-ups and capture use the lane's own
    stream: cuBLAS has one workspace for a stream, so graphs captured in one stream must not run side by side.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        """`stream`: the stream of the lane; None without CUDA."""
        self._device, self._stream = device, stream
        self._pool: Any = None

    @property
    def records(self) -> bool:
        """True if a call of a recorded function is one launch."""
        return self._stream is not None

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record a function, or return it unchanged on the CPU.

        The function runs a few times here, so the caller must set its tensors afterwards. In a capture it must not
        read a value from the device, and nothing else may run on the device.
        """
        if self._stream is None:
            for _ in range(WARM_UPS):
                function()
            return function
        with torch.cuda.device(self._device):  # a graph belongs to the current device, not to its tensors'
            torch.cuda.synchronize()
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    function()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                function()
            self._pool = graph.pool()
        return graph.replay
