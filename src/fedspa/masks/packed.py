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
        return cls(torch.from_numpy(np.packbits(mask.bool().cpu().numpy())), mask.numel())

    @property
    def density(self) -> float:
        """Share of the parameters that are active."""
        return int(np.bitwise_count(self.bits.numpy()).sum()) / self.length

    def unpack(self, like: torch.Tensor) -> torch.Tensor:
        """The mask [length] as zeros and ones, in the dtype and on the device of `like`.

        Floats, because multiplying by a float mask is many times faster than indexing by a boolean one.
        """
        flags = torch.from_numpy(np.unpackbits(self.bits.numpy(), count=self.length))
        return flags.to(device=like.device).to(dtype=like.dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedMask):
            return NotImplemented
        return self.length == other.length and torch.equal(self.bits, other.bits)
