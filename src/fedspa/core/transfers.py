"""Transfers between the CPU and a device with queued work: to it without waiting, from it with one wait for many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch


def sent(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The tensor on a device, in another dtype if given. The transfer does not wait for queued work."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # CUDA copies from unpinned memory only when its queue is empty.
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True).to(dtype or tensor.dtype)


def read_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on the CPU. Those on another device come in one transfer."""
    there = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    come = iter(parted(joined(there).cpu(), there)) if there else iter(())
    return [tensor if tensor.device.type == "cpu" else next(come) for tensor in tensors]


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of tensors, one after another: uint8 [n], on their device."""
    return torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])


def parted(data: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors from their joined bytes; `like` has their dtypes and shapes."""
    pieces = data.split([tensor.nbytes for tensor in like])
    # Cloned, because a view as another dtype must begin at a multiple of its size.
    return [
        piece.clone().view(tensor.dtype).view(tensor.shape)
        for piece, tensor in zip(pieces, like, strict=True)
    ]


class Reads:
    """Collects values that several clients need on the CPU. The first access reads all of them."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []

    def add(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Add tensors. The returned function gives them on the CPU, and waits for the device if they are not read
        yet."""
        first, last = len(self._tensors), len(self._tensors) + len(tensors)
        self._tensors += tensors
        return lambda: self._values[first:last]

    @cached_property
    def _values(self) -> list[torch.Tensor]:
        return read_together(self._tensors)
