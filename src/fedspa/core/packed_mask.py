"""A mask at rest: one bit a parameter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class PackedMask:
    """A mask over the flat weights, eight parameters a byte (the first in the highest bit)."""

    bits: torch.Tensor
    """uint8 [ceil(length / 8)], on the CPU; the bits past `length` are zero."""
    length: int

    @classmethod
    def pack(cls, mask: torch.Tensor) -> PackedMask:
        """Pack a mask [length] of zeros and ones, of any dtype and on any device."""
        flags = mask.bool()
        if flags.device.type != "cpu":  # an eighth is to be sent
            return cls(packed_by_shifts(flags).cpu(), len(flags))
        return cls(torch.from_numpy(np.packbits(flags.numpy())), len(flags))

    @property
    def active(self) -> int:
        """How many are ones."""
        return int(np.bitwise_count(self.bits.numpy()).sum())

    @property
    def density(self) -> float:
        """Share of the coordinates that are ones."""
        return self.active / self.length

    def unpack(self, like: torch.Tensor) -> torch.Tensor:
        """The mask [length] as zeros and ones, in the dtype and on the device of `like`.

        Floats, because multiplying by a float mask is many times faster than indexing by a boolean one.
        """
        if like.device.type != "cpu":
            return unpacked_by_shifts(self.bits.to(like.device), self.length).to(like.dtype)
        return torch.from_numpy(np.unpackbits(self.bits.numpy(), count=self.length)).to(like.dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedMask):
            return NotImplemented
        return self.length == other.length and torch.equal(self.bits, other.bits)


def packed_by_shifts(flags: torch.Tensor) -> torch.Tensor:
    """bool [n] as uint8 [ceil(n / 8)]: np.packbits on any device."""
    eights = torch.nn.functional.pad(flags.to(torch.uint8), (0, -len(flags) % 8)).view(-1, 8)
    return (eights << _shifts(flags.device)).sum(1, dtype=torch.uint8)


def unpacked_by_shifts(bits: torch.Tensor, count: int) -> torch.Tensor:
    """uint8 [ceil(count / 8)] as zeros and ones, uint8 [count]: np.unpackbits on any device."""
    return (bits[:, None] >> _shifts(bits.device)).bitwise_and_(1).view(-1)[:count]


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(7, -1, -1, device=device, dtype=torch.uint8)
