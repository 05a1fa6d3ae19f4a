"""A packed mask: one bit for each parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedspa.core.transfers import sent


@dataclass(frozen=True, eq=False)
class PackedMask:
    """A mask over the flat weights, eight parameters a byte (the first in the highest bit)."""

    bits: torch.Tensor
    """uint8 [ceil(length / 8)]; the bits past `length` are zero. They are on the device of the packed mask, and on the
    CPU in the state of a client with a completed update."""
    length: int
    resident: torch.Tensor | None = None
    """A copy of the bits on the device of the run, for a mask that was made there. It stays in this process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedMask, (self.bits, self.length)

    @classmethod
    def pack(cls, mask: torch.Tensor) -> PackedMask:
        """Pack a mask [length] of zeros and ones, of any dtype and on any device."""
        flags = mask.bool()
        if flags.device.type != "cpu":
            return cls(packed_by_shifts(flags), len(flags))
        return cls(torch.from_numpy(np.packbits(flags.numpy())), len(flags))

    def on_cpu(self) -> PackedMask:
        """This mask with its bits on the CPU."""
        return self if self.bits.device.type == "cpu" else PackedMask(self.bits.cpu(), self.length)

    def clone(self) -> PackedMask:
        """A copy with its own memory."""
        return PackedMask(self.bits.clone(), self.length)

    @property
    def active(self) -> int:
        """The number of ones."""
        return int(np.bitwise_count(self.bits.cpu().numpy()).sum())

    @property
    def flags(self) -> torch.Tensor:
        """The mask as bool [length] on the CPU."""
        return torch.from_numpy(np.unpackbits(self.bits.cpu().numpy(), count=self.length)).view(torch.bool)

    def unpack(self, like: torch.Tensor) -> torch.Tensor:
        """The mask [length] as zeros and ones, in the dtype and on the device of `like`.

        The mask is a float tensor, because multiplying by it is many times faster than indexing by a boolean mask.
        """
        if like.device.type != "cpu":
            bits = self.bits if self.resident is None else self.resident
            return unpacked_by_shifts(sent(bits, like.device), self.length).to(like.dtype)
        return self.flags.view(torch.uint8).to(like.dtype)

    def __or__(self, other: PackedMask) -> PackedMask:
        """The mask of the coordinates that are ones in either mask."""
        return PackedMask(self.bits | other.bits, self.length)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedMask):
            return NotImplemented
        return self.length == other.length and torch.equal(self.bits.cpu(), other.bits.cpu())


def packed_by_shifts(flags: torch.Tensor) -> torch.Tensor:
    """Pack bool [n] into uint8 [ceil(n / 8)], as np.packbits does, on any device."""
    eights = torch.nn.functional.pad(flags.to(torch.uint8), (0, -len(flags) % 8)).view(-1, 8)
    return (eights << _shifts(flags.device)).sum(1, dtype=torch.uint8)


def unpacked_by_shifts(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Unpack uint8 [ceil(count / 8)] into zeros and ones, uint8 [count], as np.unpackbits does, on any device."""
    return (bits[:, None] >> _shifts(bits.device)).bitwise_and_(1).view(-1)[:count]


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(7, -1, -1, device=device, dtype=torch.uint8)
