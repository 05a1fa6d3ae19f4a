"""Images as examples: pixels become floats on the device, augmented at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch

from fedspa.core.limits import Limited, limited
from fedspa.data.examples import Batch, Examples
from fedspa.data.sets import ArraySet, MadeImages

CLIENTS_KEPT = 4
"""Clients whose made images are kept: a client update asks for the same ones in every batch."""


@dataclass(kw_only=True)
class Augmentation(Limited):
    """Random changes to a training image, in this order; the defaults change nothing."""

    section: ClassVar[str] = "dataset.augmentation"
    crop_padding: int = limited(0, low=0)
    """Pad with so many black pixels on each side, then crop the original size at random."""
    flip: bool = False
    """Mirror left and right with probability 1/2."""
    cutout: int = limited(0, low=0)
    """After normalising, set a square of this side at a random centre to 0 (DeVries and Taylor, 2017)."""

    @property
    def active(self) -> bool:
        return bool(self.crop_padding or self.flip or self.cutout)


class Pixels(Examples):
    """An image set on a device, with the way from its uint8 pixels to the floats that a network sees.

    A batch's inputs are float [B, C, H, W] in channels-last memory, normalised; its targets are classes, int64 [B].
    mean, std: of each channel (or one for all), for pixels in [0, 1]. dtype: of the batches.
    """

    def __init__(
        self,
        images: ArraySet,
        mean: Sequence[float],
        std: Sequence[float],
        augmentation: Augmentation,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(images.targets, device, dtype)
        count, self.channels, self.height, self.width = images.inputs.shape
        self.augmentation = augmentation
        self.draws = 5 if augmentation.active else 0
        memory, size = images.inputs.permute(0, 2, 3, 1).reshape(-1), images.inputs.numel()
        if augmentation.crop_padding:
            # One black pixel after the last image: where a crop reaches over the border, it reads that one.
            memory = torch.cat([memory, torch.zeros(self.channels, dtype=torch.uint8)])
        memory = memory.to(self.device)
        self._images = memory[:size].view(count, self.height * self.width * self.channels)
        self._pixels = memory.view(-1, self.channels)  # [N*H*W + 1, C]
        self._rows = torch.arange(self.height, device=self.device)
        self._columns = torch.arange(self.width, device=self.device)
        # (pixel / 255 - mean) / std is pixel * scale + shift; both are as long as an image, which vectorises.
        pixels = self.height * self.width
        centre, spread = (
            torch.tensor(list(values), dtype=torch.float64).expand(self.channels).repeat(pixels)
            for values in (mean, std)
        )
        exact = torch.promote_types(dtype, torch.float32)  # narrower floats are rounded once, at the end
        self._scale = (1 / (255 * spread)).to(self.device, exact)
        self._shift = (-centre / spread).to(self.device, exact)

    def batch(self, rows: torch.Tensor, draws: torch.Tensor | None) -> Batch:
        """The images of `rows` int64 [B]; `draws` int64 [B, 5] as of `draw` augments them, None does not."""
        raw = self._images.index_select(0, rows) if draws is None else self._moved(rows, draws)
        floats = raw.to(self._scale.dtype).mul_(self._scale).add_(self._shift)
        images = floats.view(-1, self.height, self.width, self.channels)
        if draws is not None and self.augmentation.cutout:
            images.masked_fill_(self._hole(draws).unsqueeze(3), 0)
        return Batch(images.permute(0, 3, 1, 2).to(self.dtype), self.targets.index_select(0, rows))

    def empty_inputs(self, count: int) -> torch.Tensor:
        shape = (count, self.height, self.width, self.channels)
        return torch.zeros(shape, dtype=self.dtype, device=self.device).permute(0, 3, 1, 2)

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor | None:
        """Augmentation draws of `count` images, int64 [count, 5] on the CPU; None without augmentation.

        Columns: dy and dx in [0, 2 x padding], flip in {0, 1}, the centre of the hole: cy in [0, H), cx in [0, W).
        All five are drawn whatever is in use: switching one option on leaves the other draws as they were.
        """
        if not self.augmentation.active:
            return None
        shifts = 2 * self.augmentation.crop_padding + 1
        bounds = torch.tensor([shifts, shifts, 1 + self.augmentation.flip, self.height, self.width])
        return torch.randint(1 << 31, (count, 5), generator=generator) % bounds

    def _moved(self, rows: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Cropped and flipped images uint8 [B, H*W*C], by one gather of pixels."""
        height, width, outside = self.height, self.width, len(self._pixels) - 1
        dy, dx, flip = (draws[:, column, None] for column in range(3))
        y = self._rows + dy - self.augmentation.crop_padding
        x = torch.where(flip == 1, width - 1 - self._columns, self._columns)
        x = x + dx - self.augmentation.crop_padding
        first = rows[:, None] * (height * width) + y * width  # [B, H]: where a line of the picture begins
        first = torch.where((y < 0) | (y >= height), outside, first)
        x = torch.where((x < 0) | (x >= width), outside, x)
        # Whatever involves the outside adds up to at least its index: one clamp takes all of it there.
        index = (first[:, :, None] + x[:, None, :]).clamp_(max=outside)
        return self._pixels.index_select(0, index.view(-1)).view(len(rows), -1)

    def _hole(self, draws: torch.Tensor) -> torch.Tensor:
        """bool [B, H, W]: the square that cutout blanks, cut off at the border."""
        size = self.augmentation.cutout
        top, left = (draws[:, column, None] - size // 2 for column in (3, 4))
        lines = ((self._rows, top), (self._columns, left))
        y, x = ((line >= start) & (line < start + size) for line, start in lines)
        return y[:, :, None] & x[:, None, :]


class MadePixels(Pixels):
    """`Pixels` of images that are made for each batch."""

    in_memory = False

    def __init__(self, images: MadeImages, *preparation: Any) -> None:
        """`preparation`: the further arguments of `Pixels`."""
        empty = torch.empty(0, *images.shape, dtype=torch.uint8)
        super().__init__(ArraySet(empty, torch.empty(0, dtype=torch.int64)), *preparation)
        self._made = images
        self._prepared = lambda made: Pixels(made, *preparation)
        self._client = lru_cache(CLIENTS_KEPT)(lambda client: self._prepared(images.make(client)))

    def targets_of(self, rows: torch.Tensor) -> torch.Tensor:
        return self._made.gather(rows).targets

    def batch(self, rows: torch.Tensor, draws: torch.Tensor | None) -> Batch:
        each, first = self._made.each, int(rows[0]) // self._made.each
        if bool((rows // each == first).all()):
            return self._client(first).batch(rows - first * each, draws)
        made = self._prepared(self._made.gather(rows.cpu()))
        return made.batch(torch.arange(len(rows), device=self.device), draws)
