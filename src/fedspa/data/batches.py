"""The one place where batches are drawn and pixels become floats: on the device, without a data loader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedspa.data.source import Augmentation, ImageSet

IGNORED = -100
"""The label of an image that only fills up a batch; torch's cross-entropy leaves it out."""


@dataclass(frozen=True)
class Batch:
    """images: float [B, C, H, W] in channels-last memory, normalised. labels: int64 [B]."""

    images: torch.Tensor
    labels: torch.Tensor


class Pixels:
    """An image set on a device, with the way from its uint8 pixels to the floats that a network sees.

    mean, std: of each channel (or one for all), for pixels in [0, 1]. dtype: of the batches.
    """

    in_memory: ClassVar[bool] = True
    """Whether the images lie on the device, so that batches can be gathered by a captured graph."""

    def __init__(
        self,
        images: ImageSet,
        mean: Sequence[float],
        std: Sequence[float],
        augmentation: Augmentation,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        count, self.channels, self.side, _ = images.images.shape
        self.augmentation = augmentation
        self.device = torch.device(device)
        self.dtype = dtype
        self._own_labels, self.labels = images.labels.cpu(), images.labels.to(self.device)
        memory, size = images.images.permute(0, 2, 3, 1).reshape(-1), images.images.numel()
        if augmentation.crop_padding:
            # One black pixel after the last image: where a crop reaches over the border, it reads that one.
            memory = torch.cat([memory, torch.zeros(self.channels, dtype=torch.uint8)])
        memory = memory.to(self.device)
        self._images = memory[:size].view(count, self.side * self.side * self.channels)
        self._pixels = memory.view(-1, self.channels)  # [N*H*W + 1, C]
        self._line = torch.arange(self.side, device=self.device)
        # (pixel / 255 - mean) / std is pixel * scale + shift; both are as long as an image, which vectorises.
        pixels = self.side * self.side
        centre, spread = (
            torch.tensor(list(values), dtype=torch.float64).expand(self.channels).repeat(pixels)
            for values in (mean, std)
        )
        exact = torch.promote_types(dtype, torch.float32)  # narrower floats are rounded once, at the end
        self._scale = (1 / (255 * spread)).to(self.device, exact)
        self._shift = (-centre / spread).to(self.device, exact)

    def labels_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The labels int64 [n] of rows int64 [n], both on the CPU."""
        return self._own_labels[rows]

    def batch(self, rows: torch.Tensor, draws: torch.Tensor | None) -> Batch:
        """The images of `rows` int64 [B]; `draws` int64 [B, 5] as of `draw` augments them, None does not."""
        raw = self._images.index_select(0, rows) if draws is None else self._moved(rows, draws)
        floats = raw.to(self._scale.dtype).mul_(self._scale).add_(self._shift)
        images = floats.view(-1, self.side, self.side, self.channels)
        if draws is not None and self.augmentation.cutout:
            images.masked_fill_(self._hole(draws).unsqueeze(3), 0)
        return Batch(images.permute(0, 3, 1, 2).to(self.dtype), self.labels.index_select(0, rows))

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor | None:
        """Augmentation draws of `count` images, int64 [count, 5] on the CPU; None without augmentation.

        Columns: dy and dx in [0, 2 x padding], flip in {0, 1}, the centre cy and cx of the hole in [0, side).
        All five are drawn whatever is in use: switching one option on leaves the other draws as they were.
        """
        if not self.augmentation.active:
            return None
        shifts = 2 * self.augmentation.crop_padding + 1
        bounds = torch.tensor([shifts, shifts, 1 + self.augmentation.flip, self.side, self.side])
        return torch.randint(1 << 31, (count, 5), generator=generator) % bounds

    def epoch(
        self, rows: torch.Tensor, batch_size: int, generator: torch.Generator, drop_last: bool = False
    ) -> Iterator[Batch]:
        """Every row of `rows` (int64 [n] on the CPU) once, in random order, augmented.

        The order, then all draws of the epoch come from the generator and go to the device in one transfer.
        The last batch may be a partial one; `drop_last` leaves it out, even where it is the only one.
        """
        for part in self.plan(rows, generator).to(self.device, non_blocking=True).split(batch_size):
            if not (drop_last and len(part) < batch_size):
                yield self.planned(part)

    def plan(self, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """An epoch over `rows` (int64 [n] on the CPU) before it is cut into batches: int64 [n, 1 or 6] on the CPU.

        The first column are the rows in their order, the others the augmentation's draws where there is one.
        """
        order = rows[torch.randperm(len(rows), generator=generator)]
        draws = self.draw(len(rows), generator)
        return order[:, None] if draws is None else torch.cat([order[:, None], draws], 1)

    def planned(self, part: torch.Tensor) -> Batch:
        """The images of a part of a plan, int64 [B, 1 or 6] on the device."""
        return self.batch(part[:, 0], part[:, 1:] if part.shape[1] > 1 else None)

    def filled_up(self, part: torch.Tensor) -> Batch:
        """The same of a part in which a row of -1 only fills up: its image is any, its label `IGNORED`."""
        batch = self.planned(part.clamp(min=0))
        return Batch(batch.images, batch.labels.masked_fill(part[:, 0] < 0, IGNORED))

    def in_order(self, rows: torch.Tensor, batch_size: int) -> Iterator[Batch]:
        """The rows (int64 [n]) as they come, without augmentation: for evaluation."""
        for part in rows.to(self.device).split(batch_size):
            yield self.batch(part, None)

    def _moved(self, rows: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Cropped and flipped images uint8 [B, H*W*C], by one gather of pixels."""
        side, outside = self.side, len(self._pixels) - 1
        dy, dx, flip = (draws[:, column, None] for column in range(3))
        y = self._line + dy - self.augmentation.crop_padding
        x = torch.where(flip == 1, side - 1 - self._line, self._line) + dx - self.augmentation.crop_padding
        first = rows[:, None] * (side * side) + y * side  # [B, H]: where a line of the picture begins
        first = torch.where((y < 0) | (y >= side), outside, first)
        x = torch.where((x < 0) | (x >= side), outside, x)
        # Whatever involves the outside adds up to at least its index: one clamp takes all of it there.
        index = (first[:, :, None] + x[:, None, :]).clamp_(max=outside)
        return self._pixels.index_select(0, index.view(-1)).view(len(rows), -1)

    def _hole(self, draws: torch.Tensor) -> torch.Tensor:
        """bool [B, H, W]: the square that cutout blanks, cut off at the border."""
        size = self.augmentation.cutout
        top, left = (draws[:, column, None] - size // 2 for column in (3, 4))
        y, x = ((self._line >= start) & (self._line < start + size) for start in (top, left))
        return y[:, :, None] & x[:, None, :]
