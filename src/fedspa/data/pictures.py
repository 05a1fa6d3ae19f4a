"""From an encoded image of any size and colour mode to the uint8 pixels of a data set."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedspa.core.errors import brief

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Of Pillow's formats those that hold images and nothing else: to read an EPS, it would run another program."""

CHANNELS = {"grey": 1, "rgb": 3, "rgba": 4}
"""What a data set can be turned into, and how many channels that has."""
GREY = ("1", "L", "LA", "La", "I", "F", "I;16", "I;16L", "I;16B", "I;16N")
ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes of more than 8 bits a channel."""
ORIENTATION = 0x0112
"""The tag of EXIF that says how a picture is to be turned."""
RESIZES = ("crop", "pad", "stretch")


class BadPicture(Exception):
    """Why an image cannot be used, as the end of a sentence: "it is 7 x 6 pixels, ..."."""


@dataclass(frozen=True)
class Fit:
    """How images become arrays uint8 [side, side, channels]. Only what is asked for may lose anything."""

    side: int
    channels: int
    resize: str | None = None
    """crop (the middle square), pad (with black) or stretch to the size; null: every image has it already."""
    colour: str | None = None
    """grey, rgb or rgba: turned into it. null: as the images are; only grey ones are spread over three channels."""
    background: int | None = None
    """The grey value behind transparent pixels; null: there are none."""
    white: int | None = None
    """The value of images of more than 8 bits a channel that becomes 255; null: there are none."""

    def pixels(self, picture: Image) -> np.ndarray:
        """The pixels uint8 [side, side, channels] of an open picture. Raises `BadPicture`."""
        from PIL import Image, ImageOps

        square = (self.side, self.side)
        width, height = size_of(picture)
        if self.resize is None and (width, height) != square:
            raise BadPicture(
                f"it is {width} x {height} pixels, dataset.image_size={self.side}: set dataset.resize to crop, pad or "
                "stretch"
            )
        try:
            picture = ImageOps.exif_transpose(picture)
            picture.load()
        except Exception as error:  # Pillow raises of many kinds on broken bytes
            raise BadPicture(brief(error)) from error
        picture = self._coloured(picture)
        if picture.size != square:
            bilinear = Image.Resampling.BILINEAR
            if self.resize == "stretch":
                picture = picture.resize(square, bilinear)
            elif self.resize == "pad":
                picture = ImageOps.pad(picture, square, bilinear)
            else:
                picture = ImageOps.fit(picture, square, bilinear)
        return np.asarray(picture).reshape(self.side, self.side, self.channels)

    def _coloured(self, picture: Image) -> Image:
        """The picture in mode L, RGB or RGBA, after the number of channels."""
        from PIL import Image

        mode, channels = picture.mode, channels_of(picture)
        if mode in DEEP:
            picture = self._shallow(picture)
        if has_alpha(picture) and self.channels != CHANNELS["rgba"]:
            picture = picture.convert("RGBA")
            if np.asarray(picture.getchannel("A")).min() < 255:
                if self.background is None:
                    raise BadPicture(
                        "it has transparent pixels: set dataset.background to the grey value behind them (0 to 255), "
                        "or dataset.colour=rgba to learn from the transparency"
                    )
                behind = Image.new("RGBA", picture.size, (self.background,) * 3 + (255,))
                picture = Image.alpha_composite(behind, picture)
        if channels > self.channels and self.colour != "grey":
            raise BadPicture(
                f"its colour mode is {mode}, dataset.channels={self.channels}: set dataset.colour to rgb or grey"
            )
        return picture.convert({1: "L", 3: "RGB", 4: "RGBA"}[self.channels])

    def _shallow(self, picture: Image) -> Image:
        """A picture of more than 8 bits in mode L."""
        from PIL import Image

        if self.white is None:
            raise BadPicture(
                f"its pixels have more than 8 bits (mode {picture.mode}): set dataset.white to the value that is to "
                "become white, such as 65535"
            )
        values = np.asarray(picture).astype(np.float64) * (255 / self.white)
        return Image.fromarray(np.rint(values.clip(0, 255)).astype(np.uint8), "L")


def opened(encoded: bytes | None) -> Image:
    """A picture whose header was read. Raises `BadPicture`."""
    from PIL import Image

    if not encoded:
        raise BadPicture("it holds no bytes")
    try:
        return Image.open(io.BytesIO(encoded), formats=FORMATS)
    except Exception as error:  # Pillow raises of many kinds on broken bytes
        raise BadPicture(brief(error)) from error


def size_of(picture: Image) -> tuple[int, int]:
    """Width and height as a person sees it: some cameras write the picture lying, with a note to turn it.

    Raises `BadPicture` where the bytes behind the header are broken.
    """
    try:
        turned = picture.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
    except Exception as error:  # Pillow raises of many kinds on broken bytes
        raise BadPicture(brief(error)) from error
    return picture.size[::-1] if turned else picture.size


def has_alpha(picture: Image) -> bool:
    """Whether any pixel may be transparent."""
    return picture.mode in ALPHA or "transparency" in picture.info


def channels_of(picture: Image) -> int:
    """1 of a grey picture, 3 of any other; transparency is not counted."""
    return 1 if picture.mode in GREY else 3
