"""From an encoded image of any size and colour mode to the uint8 pixels of a data set."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedspa.core.errors import brief, written

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Pillow's formats that hold images and nothing else: to read an EPS, it would run another program."""
CHANNELS = {"grey": 1, "rgb": 3, "rgba": 4}
"""The colours that a data set can be turned into, with their numbers of channels."""
RESIZES = ("crop", "pad", "stretch")


class BadPicture(Exception):
    """The reason why an image cannot be used, as the end of a sentence: "it is 7 x 6 pixels, ..."."""


@contextmanager
def _sound() -> Iterator[None]:
    """Raise `BadPicture` for broken bytes."""
    try:
        yield
    except Exception as error:  # Pillow raises of many kinds
        raise BadPicture(brief(error)) from error


def opened(encoded: bytes | None) -> Image:
    """A picture whose header was read, as a person sees it: some cameras write it lying, with a note to turn it."""
    from PIL import Image, ImageOps

    if not encoded:
        raise BadPicture("it holds no bytes")
    with _sound():
        picture = Image.open(io.BytesIO(encoded), formats=FORMATS)
        ImageOps.exif_transpose(picture, in_place=True)
        return picture


def channels_of(picture: Image) -> int:
    """1 of a grey picture, 3 of any other; transparency is not counted."""
    from PIL import Image

    return 1 if Image.getmodebase(picture.mode) == "L" else 3


@dataclass(frozen=True)
class Fit:
    """The way from images to arrays uint8 [height, width, channels]. Only an option may lose anything."""

    height: int
    width: int
    channels: int
    resize: str | None = None
    """crop (the middle part), pad (with black) or stretch to the size; null: every image has it already."""
    colour: str | None = None
    """grey, rgb or rgba: turned into it. null: as the images are; only grey ones are spread over three channels."""
    background: int | None = None
    """The grey value behind transparent pixels; null: there are none."""
    white: int | None = None
    """The value of images of more than 8 bits a channel that becomes 255; null: there are none."""

    def pixels(self, picture: Image) -> np.ndarray:
        """The pixels uint8 [height, width, channels]. Raises `BadPicture`."""
        from PIL import Image, ImageOps

        wanted, (width, height) = (self.width, self.height), picture.size
        if self.resize is None and picture.size != wanted:
            side = written(self.width if self.width == self.height else [self.height, self.width])
            raise BadPicture(
                f"it is {width} x {height} pixels, dataset.image_size={side}: set dataset.resize to crop, pad or "
                "stretch"
            )
        with _sound():
            picture.load()
        picture = self._coloured(self._opaque(self._of_eight_bits(picture)), channels_of(picture))
        if self.resize is not None and picture.size != wanted:
            ways: dict[str, Any] = {"crop": ImageOps.fit, "pad": ImageOps.pad, "stretch": Image.Image.resize}
            picture = ways[self.resize](picture, wanted, Image.Resampling.BILINEAR)
        return np.asarray(picture).reshape(self.height, self.width, self.channels)

    def _of_eight_bits(self, picture: Image) -> Image:
        from PIL import Image

        if not picture.mode.startswith(("I", "F")):
            return picture
        if self.white is None:
            raise BadPicture(
                f"its pixels have more than 8 bits (mode {picture.mode}): set dataset.white to the value that is to "
                "become white, such as 65535"
            )
        values = np.asarray(picture).astype(np.float64) * (255 / self.white)
        return Image.fromarray(np.rint(values.clip(0, 255)).astype(np.uint8), "L")

    def _opaque(self, picture: Image) -> Image:
        """The picture on its background, unless transparency is a channel."""
        from PIL import Image

        if self.channels == CHANNELS["rgba"] or not picture.has_transparency_data:
            return picture
        picture = picture.convert("RGBA")
        if picture.getchannel("A").getextrema()[0] == 255:
            return picture
        if self.background is None:
            raise BadPicture(
                "it has transparent pixels: set dataset.background to the grey value behind them (0 to 255), or "
                "dataset.colour=rgba to learn from the transparency"
            )
        behind = Image.new("RGBA", picture.size, (self.background,) * 3 + (255,))
        return Image.alpha_composite(behind, picture)

    def _coloured(self, picture: Image, channels: int) -> Image:
        """The picture in mode L, RGB or RGBA; `channels`: those of the original."""
        if channels > self.channels and self.colour != "grey":
            raise BadPicture(
                f"its colour mode is {picture.mode}, dataset.channels={self.channels}: set dataset.colour to rgb or "
                "grey"
            )
        return picture.convert({1: "L", 3: "RGB", 4: "RGBA"}[self.channels])
