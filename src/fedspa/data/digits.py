"""The handwritten digits that ship inside scikit-learn's wheel: 1,797 real images of 8 x 8, no download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedspa.core.errors import UserError, brief
from fedspa.data.sets import ArraySet
from fedspa.data.source import ImageSource

TEST_IMAGES_PER_CLASS = 40


@dataclass(kw_only=True)
class Digits(ImageSource):
    """`sklearn.datasets.load_digits`, pixels 0 to 16 stretched to 0 to 255.

    The set has no official split. Ours takes 40 test images of each digit, evenly spaced over its rows, which
    are ordered by writer: both splits hold every writer, and no digit is scarce in any client's test set.
    """

    def read(self, split: str) -> ArraySet:
        from sklearn.datasets import load_digits

        try:
            digits = load_digits()
        except Exception as error:  # NumPy and gzip raise of many kinds on a broken file
            raise UserError(
                f"dataset={self.name}: the copy inside scikit-learn cannot be read ({brief(error)}): reinstall it."
            ) from error
        rows = split_rows(digits.target, split)
        rows = rows[: self.rows_to_read(split, len(rows), f"dataset={self.name}")]
        pixels = np.rint(digits.images[rows] * (255 / 16)).astype(np.uint8)
        labels = digits.target[rows].astype(np.int64)
        return ArraySet(torch.from_numpy(pixels[:, None]), torch.from_numpy(labels))


def split_rows(labels: np.ndarray, split: str) -> np.ndarray:
    """The sorted rows of the train or the test split, from the labels int [N] of the whole set."""
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        test[rows[np.arange(TEST_IMAGES_PER_CLASS) * len(rows) // TEST_IMAGES_PER_CLASS]] = True
    return np.flatnonzero(test if split == "test" else ~test)
