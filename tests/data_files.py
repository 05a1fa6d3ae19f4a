"""A small data set in files, for tests of what a run makes of other data in its place."""

from __future__ import annotations

import struct
from pathlib import Path

OF_FILES = (
    *(
        "dataset=mnist",
        "model=small_cnn",
        "dataset.train_size=60",
        "dataset.test_size=40",
        "dataset.classes=3",
    ),
    *("dataset.image_size=8", "dataset.client_test_images=6"),
)
"""Its facts; `dataset.path` is to be added."""


def write_data(folder: Path, shift: int) -> Path:
    """The files, of 60 and 40 images; with another `shift` the same images have other labels."""
    folder.mkdir(exist_ok=True)
    for split, count in (("train", 60), ("t10k", 40)):
        images = bytes(7 * i % 256 for i in range(count * 64))
        labels = bytes((i + shift) % 3 for i in range(count))
        (folder / f"{split}-images-idx3-ubyte").write_bytes(
            struct.pack(">HBB3I", 0, 8, 3, count, 8, 8) + images
        )
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, count) + labels)
    return folder
