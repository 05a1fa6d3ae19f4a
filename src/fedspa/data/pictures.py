"""From an encoded image of any size and colour mode to the uint8 pixels of a data set."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedspa.core.errors import brief, written

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""The formats of Pillow that hold only images: to read an EPS, Pillow would run another program."""

CHANNELS = {"grey": 1, "rgb": 3, "rgba": 4}
"""The colours that a data set can be turned into, with their numbers of channels."""
GREY = ("1", "L", "LA", "La", "I", "F", "I;16", "I;16L", "I;16B", "I;16N")
ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes of more than 8 bits a channel."""
ORIENTATION = 0x0112
"""The tag of EXIF that says how a picture is to be turned."""
LYING = (5, 6, 7, 8)
RESIZES = ("crop", "pad", "stretch")


class BadPicture(Exception):
    """Why an image cannot be used, as the end of a sentence: "it is 7 x 6 pixels, ..."."""


@dataclass(frozen=True)
class Fit:
    """The way from images to arrays uint8 [height, width, channels]. Only what is asked for may lose anything."""

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

    def pixels(self, encoded: bytes | None) -> np.ndarray:
        """The pixels uint8 [height, width, channels] of an encoded picture. Raises `BadPicture`."""
        from PIL import Image, ImageOps

        picture = opened(encoded)
        turned, wanted = orientation(picture), (self.width, self.height)
        size = picture.size[::-1] if turned in LYING else picture.size
        if self.resize is None and size != wanted:  # known from the header, before memory is taken
            side = written(self.width if self.width == self.height else [self.height, self.width])
            raise BadPicture(
                f"it is {size[0]} x {size[1]} pixels, dataset.image_size={side}: set dataset.resize to crop, pad or "
                "stretch"
            )
        try:
            if turned != 1:
                picture = ImageOps.exif_transpose(picture)
            picture.load()
        except Exception as error:  # Pillow raises of many kinds on broken bytes
            raise BadPicture(brief(error)) from error
        picture, bilinear = self._coloured(picture), Image.Resampling.BILINEAR
        if picture.size != wanted:
            if self.resize == "stretch":
                picture = picture.resize(wanted, bilinear)
            else:
                picture = (ImageOps.pad if self.resize == "pad" else ImageOps.fit)(picture, wanted, bilinear)
        return np.asarray(picture).reshape(self.height, self.width, self.channels)

    def _coloured(self, picture: Image) -> Image:
        """The picture in mode L, RGB or RGBA, after the number of channels."""
        from PIL import Image

        mode, channels = picture.mode, channels_of(picture)
        if mode in DEEP:
            if self.white is None:
                raise BadPicture(
                    f"its pixels have more than 8 bits (mode {mode}): set dataset.white to the value that is to become "
                    "white, such as 65535"
                )
            values = np.asarray(picture).astype(np.float64) * (255 / self.white)
            picture = Image.fromarray(np.rint(values.clip(0, 255)).astype(np.uint8), "L")
        transparent = picture.mode in ALPHA or "transparency" in picture.info
        if transparent and self.channels != CHANNELS["rgba"]:
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
        wanted = {1: "L", 3: "RGB", 4: "RGBA"}[self.channels]
        return picture if picture.mode == wanted else picture.convert(wanted)


def opened(encoded: bytes | None) -> Image:
    """A picture whose header was read. Raises `BadPicture`."""
    from PIL import Image

    if not encoded:
        raise BadPicture("it holds no bytes")
    try:
        return Image.open(io.BytesIO(encoded), formats=FORMATS)
    except Exception as error:  # Pillow raises of many kinds on broken bytes
        raise BadPicture(brief(error)) from error


def orientation(picture: Image) -> int:
    """The picture's orientation as EXIF numbers it; 1 if it is upright.

    Raises `BadPicture` where the bytes behind the header are broken.
    """
    try:
        return int(picture.getexif().get(ORIENTATION, 1))
    except Exception as error:  # Pillow raises of many kinds on broken bytes
        raise BadPicture(brief(error)) from error


def size_of(picture: Image) -> tuple[int, int]:
    """Width and height as a person sees it: some cameras write the picture lying, with a note to turn it."""
    return picture.size[::-1] if orientation(picture) in LYING else picture.size


def channels_of(picture: Image) -> int:
    """1 of a grey picture, 3 of any other; transparency is not counted."""
    return 1 if picture.mode in GREY else 3
