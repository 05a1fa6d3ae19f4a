"""Functions recorded once as CUDA graphs and played back, where there is CUDA; elsewhere the functions themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 3
"""Calls before the capture: compilers, cuDNN and cuBLAS set themselves up in them, which a capture forbids."""


class Captures:
    """Records functions that read and write tensors which stay where they are, to call them without the cost of their
    launches.

    All graphs of an engine work in one memory pool, of the size that the largest needs: nothing that a call allocates
    may outlive it, and no two run at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """The function is run a few times here: whoever calls sets the tensors afterwards. In a capture it must not
        read a value from the device. On the CPU the function is run the same number of times, and returned."""
        if self._device.type != "cuda":
            for _ in range(WARM_UPS):
                function()
            return function
        with torch.cuda.device(self._device):  # a graph is of the current device, whatever its tensors lie on
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                function()
            self._pool = graph.pool()
        return graph.replay
