"""A function recorded once as a CUDA graph and played back, where there is CUDA; elsewhere the function itself."""

from __future__ import annotations

from collections.abc import Callable

import torch

WARM_UPS = 3
"""Calls before the capture: compilers, cuDNN and cuBLAS set themselves up in them, which a capture forbids."""


def captured(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Calls of a function that reads and writes tensors which stay where they are, without the cost of its launches.

    The function is run a few times here: whoever calls sets the tensors afterwards. In a capture it must not read
    a value from the device. On the CPU the function is run the same number of times, and returned.
    """
    if device.type != "cuda":
        for _ in range(WARM_UPS):
            function()
        return function
    with torch.cuda.device(device):  # a graph is of the current device, whatever its tensors lie on
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
    return graph.replay
