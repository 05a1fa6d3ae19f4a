"""Images in memory, and how training changes them at random."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedspa.core.errors import check_range


@dataclass(kw_only=True)
class Augmentation:
    """Random changes to a training image, in this order; the defaults change nothing."""

    crop_padding: int = 0
    """Pad with so many black pixels on each side, then crop the original size at random."""
    flip: bool = False
    """Mirror left and right with probability 1/2."""
    cutout: int = 0
    """After normalising, set a square of this side at a random centre to 0 (DeVries and Taylor, 2017)."""

    def __post_init__(self) -> None:
        check_range("dataset.augmentation.crop_padding", self.crop_padding, low=0)
        check_range("dataset.augmentation.cutout", self.cutout, low=0)

    @property
    def active(self) -> bool:
        return bool(self.crop_padding or self.flip or self.cutout)


@dataclass(frozen=True)
class ImageSet:
    """Images uint8 [N, C, H, W] and their labels int64 [N], on the CPU."""

    images: torch.Tensor
    labels: torch.Tensor
    groups: np.ndarray | None = None
    """The value by which natural partitions deal, such as the writer: str [N]. None where the source has none."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def inputs(self) -> torch.Tensor:
        return self.images

    @property
    def targets(self) -> torch.Tensor:
        return self.labels
