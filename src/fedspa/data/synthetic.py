"""Images made up from a seed: no file, no download, any number of classes, channels and pixels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from fedspa.core.limits import limited
from fedspa.core.randomness import generator
from fedspa.data.sets import ArraySet
from fedspa.data.source import ImageSource

ROWS_AT_ONCE = 1024
"""Images drawn under one key: a row limit takes a prefix, and memory stays small."""


@dataclass(kw_only=True)
class SyntheticImages(ImageSource):
    """Each class is a smooth random pattern; an image is its class's pattern under pixel noise.

    The data depends on `data_seed` alone, not on the run's seed: runs with several seeds share one data set.
    """

    noise: float = limited(1.0, low=0)
    """Standard deviation of the pixel noise, in units of the pattern's own."""
    data_seed: int = limited(0, low=0)

    @cached_property
    def patterns(self) -> torch.Tensor:
        """The class patterns, float [classes, C, H, W]: 4 x 4 grids of normal draws, stretched."""
        shape = (self.classes, self.channels, 4, 4)
        coarse = torch.randn(shape, generator=generator(self.data_seed, "synthetic_patterns"))
        return torch.nn.functional.interpolate(coarse, size=self.sides, mode="bilinear")

    def draw(self, labels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The images uint8 [n, C, H, W] of labels int64 [n] under standard normal noise [n, C, H, W]."""
        return (128 + 40 * (self.patterns[labels] + self.noise * noise)).clamp(0, 255).to(torch.uint8)

    def read(self, split: str) -> ArraySet:
        total = self.train_size if split == "train" else self.test_size
        rows = self.rows_to_read(split, total, f"dataset={self.name}")
        images = torch.empty(rows, *self.input_shape, dtype=torch.uint8)
        labels = torch.empty(rows, dtype=torch.int64)
        for piece, first in enumerate(range(0, rows, ROWS_AT_ONCE)):
            source = generator(self.data_seed, f"synthetic_{split}", round=piece)
            drawn = torch.randint(self.classes, (ROWS_AT_ONCE,), generator=source)
            noise = torch.randn((ROWS_AT_ONCE, *images.shape[1:]), generator=source)
            images[first : first + ROWS_AT_ONCE] = self.draw(drawn, noise)[: rows - first]
            labels[first : first + ROWS_AT_ONCE] = drawn[: rows - first]
        return ArraySet(images, labels)
