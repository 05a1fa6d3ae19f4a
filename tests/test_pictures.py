"""Images of every colour mode and size become the pixels that were asked for, or are refused in a sentence."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedspa.data.pictures import BadPicture, Fit, opened

SIDE = 4
RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (SIDE, SIDE), dtype=np.uint8)
RGB = RNG.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
DEEP = RNG.integers(0, 4096, (SIDE, SIDE), dtype=np.uint16)
ALPHA = np.array([[255, 0, 128, 255]] * SIDE, dtype=np.uint8)


def rgba(alpha: np.ndarray) -> Image.Image:
    return Image.fromarray(np.dstack([RGB, alpha]), "RGBA")


def read(
    picture: Image.Image, channels: int, kind: str = "PNG", side: int = SIDE, **options: Any
) -> np.ndarray:
    stream = io.BytesIO()
    picture.save(stream, kind, **options.pop("save", {}))
    return Fit(side, side, channels, **options).pixels(opened(stream.getvalue()))


def test_grey_and_colour() -> None:
    grey, colour = Image.fromarray(GREY), Image.fromarray(RGB)
    assert np.array_equal(read(grey, 1)[..., 0], GREY)
    assert all(np.array_equal(read(grey, 3)[..., c], GREY) for c in range(3))
    assert np.array_equal(read(colour, 3), RGB)
    with pytest.raises(
        BadPicture, match="its colour mode is RGB, dataset.channels=1: set dataset.colour to rgb or grey"
    ):
        read(colour, 1)
    assert np.array_equal(read(colour, 1, colour="grey")[..., 0], np.asarray(colour.convert("L")))
    assert np.array_equal(read(Image.fromarray(GREY > 99), 1)[..., 0], 255 * (GREY > 99))


def test_palettes_and_other_colour_spaces() -> None:
    palette = Image.fromarray(RGB).quantize(16)
    assert np.array_equal(read(palette, 3), np.asarray(palette.convert("RGB")))
    plain = Image.new("CMYK", (SIDE, SIDE), (0, 0, 0, 255))
    assert read(plain, 3, "TIFF").max() == 0


def test_transparency() -> None:
    opaque, through = rgba(np.full_like(ALPHA, 255)), rgba(ALPHA)
    assert np.array_equal(read(opaque, 3), RGB)
    assert np.array_equal(read(through, 4, colour="rgba"), np.dstack([RGB, ALPHA]))
    with pytest.raises(
        BadPicture, match="it has transparent pixels: set dataset.background to the grey value"
    ):
        read(through, 3)
    behind = read(through, 3, background=200)
    assert np.array_equal(behind[:, 0], RGB[:, 0]) and (behind[:, 1] == 200).all()
    assert np.allclose(behind[:, 2], (RGB[:, 2] * 128.0 + 200 * 127) / 255, atol=1)
    grey = Image.fromarray(np.dstack([GREY, ALPHA]), "LA")
    on_white = read(grey, 1, background=255)[..., 0]
    assert np.array_equal(on_white[:, 0], GREY[:, 0]) and (on_white[:, 1] == 255).all()
    palette = Image.new("P", (SIDE, SIDE), 1)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    assert read(palette, 3, background=7, save={"transparency": 1})[0, 0].tolist() == [7, 7, 7]
    assert read(palette, 3, save={"transparency": 0})[0, 0].tolist() == [40, 50, 60]


def test_more_than_eight_bits() -> None:
    deep = Image.fromarray(DEEP)
    with pytest.raises(BadPicture, match=r"more than 8 bits \(mode I;16.*\): set dataset.white to the value"):
        read(deep, 1)
    assert np.array_equal(read(deep, 1, white=4095)[..., 0], np.rint(DEEP / 4095.0 * 255))
    assert read(deep, 1, white=100).max() == 255
    assert read(deep, 3, white=4095).shape == (SIDE, SIDE, 3)
    floats = Image.fromarray(np.full((SIDE, SIDE), 50.0, np.float32))
    assert (read(floats, 1, "TIFF", white=200) == 64).all()


def test_resizing() -> None:
    wide = np.zeros((4, 8, 3), np.uint8)
    wide[:, :2], wide[:, 2:6], wide[:, 6:] = 10, 100, 200
    picture = Image.fromarray(wide)
    with pytest.raises(
        BadPicture, match="it is 8 x 4 pixels, dataset.image_size=4: set dataset.resize to crop, pad or"
    ):
        read(picture, 3)
    assert (read(picture, 3, resize="crop") == 100).all()
    padded = read(picture, 3, side=8, resize="pad")
    assert (padded[:2] == 0).all() and (padded[6:] == 0).all() and np.array_equal(padded[2:6], wide)
    stretched = read(picture, 3, resize="stretch")
    assert stretched[0, 0, 0] < 50 and stretched[0, 3, 0] > 150


def test_a_picture_that_a_camera_turned_stands_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by 90 degrees, clockwise
    turned = read(Image.fromarray(RGB[:, :2]), 3, resize="stretch", save={"exif": exif})
    assert np.array_equal(
        turned,
        np.asarray(Image.fromarray(np.rot90(RGB[:, :2], -1)).resize((4, 4), Image.Resampling.BILINEAR)),
    )
    with pytest.raises(BadPicture, match="it is 4 x 2 pixels"):
        read(Image.fromarray(RGB[:, :2]), 3, save={"exif": exif})


@pytest.mark.parametrize(
    "data", [None, b"", b"no picture", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 6\n"]
)
def test_what_is_no_picture_is_refused(data: bytes | None) -> None:
    with pytest.raises(BadPicture, match="it holds no bytes|cannot identify"):
        opened(data)


def test_broken_bytes_end_in_a_sentence() -> None:
    stream = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(stream, "PNG")
    for end in range(40, len(stream.getvalue()) - 20, 701):
        with pytest.raises(BadPicture) as told:
            Fit(64, 64, 3).pixels(opened(stream.getvalue()[:end]))
        assert "\n" not in str(told.value)
