"""How many test images of each class a client is tested on, where the partition gives it none of its own."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from fedspa.core.errors import UserError
from fedspa.data.source import ImageSource

MOST_ASKED = 2**31
"""More than any test split holds: larger numbers ask for the same, and their products would not fit 64 bits."""
TRIES = 1000
"""Smaller sizes that are tried before none is suggested."""


def test_counts(
    counts: np.ndarray, available: np.ndarray, source: ImageSource, class_names: Sequence[str] = ()
) -> np.ndarray:
    """Test images of each class, int64 [clients, classes], for clients that train on `counts` [clients, classes].

    available: int64 [classes], test images there are of each class. Raises `UserError` where a client would get none,
    or less than `dataset.least_test_share` of what is asked for.
    """
    takes = _takes(counts, source.client_test_images, available, source.client_test_rounding)
    if _enough(takes, source.client_test_images, source.least_test_share):
        return takes
    raise UserError(_refusal(counts, available, takes, source, class_names))


def largest_fitting(counts: np.ndarray, total: int, available: np.ndarray) -> np.ndarray:
    """`largest_remainder` of the most images up to `total` that asks no class for more than is available.

    All int64 [classes]. Zeros where not even one image fits.
    """
    held = counts > 0
    # Each class gets the whole part of its quota at least: beyond this size, that alone is more than there is.
    bound = ((available[held] + 1) * counts.sum() - 1) // counts[held]
    # Below it every size is tried: more images in all can mean fewer of one class (the Alabama paradox).
    for size in range(min(total, int(bound.min()), int(available[held].sum())), 0, -1):
        take = largest_remainder(counts, size)
        if (take <= available).all():
            return take
    return np.zeros_like(counts)


def largest_remainder(counts: np.ndarray, total: int) -> np.ndarray:
    """Share `total` out in proportion to `counts` int [classes], in whole numbers that add up to it.

    Each gets the whole part of its quota, the largest remainders one more; a tie goes to the lower class.
    """
    shares, remainders = np.divmod(counts * total, counts.sum())
    rest = total - shares.sum()
    shares[np.argsort(-remainders, kind="stable")[:rest]] += 1
    return shares


def _takes(counts: np.ndarray, asked: int, available: np.ndarray, rounding: str) -> np.ndarray:
    asked = min(asked, MOST_ASKED)
    if rounding == "ceil":
        return np.minimum(-(-counts * asked // counts.sum(axis=1, keepdims=True)), available)
    return np.stack([largest_fitting(own, asked, available) for own in counts])


def _enough(takes: np.ndarray, asked: int, share: float) -> bool:
    return int(takes.sum(axis=1).min()) >= _least(asked, share)


def _least(asked: int, share: float) -> Fraction:
    """The fewest test images that do; of the decimal that was written: 0.07 x 100 is 7."""
    return max(Fraction(str(share)) * asked, Fraction(1))


def _refusal(
    counts: np.ndarray,
    available: np.ndarray,
    takes: np.ndarray,
    source: ImageSource,
    class_names: Sequence[str],
) -> str:
    """What is wrong, why, and what would be right."""
    asked, share, sizes = source.client_test_images, source.least_test_share, takes.sum(axis=1)
    client, few = int(sizes.argmin()), sum(size < _least(asked, share) for size in sizes.tolist())
    got, own = int(sizes[client]), counts[client]
    scarce = int(np.where(own > 0, available / np.maximum(own, 1), np.inf).argmin())
    name = class_names[scarce] if class_names else str(scarce)
    ways = []
    if source.effective_test_size < source.test_size:
        ways.append(f"more than dataset.test_rows={source.test_rows}")
    elif not available[scarce]:
        ways += _other_split(counts.sum(axis=0), source)
        ways.append(f"test images of class {name} (or no training images of it)")
    if size := _possible(counts, available, source, got):
        ways.append(f"dataset.client_test_images={size}")
        ways.append(f"dataset.least_test_share={100 * got // asked / 100:g}")
    return (
        f"client {client} gets {got or 'no'} test image{'' if got in (0, 1) else 's'}, where "
        f"dataset.client_test_images={asked} and dataset.least_test_share={share:g} ask for more (too few for {few} of "
        f"{len(counts)} clients): class {name} is {own[scarce] / own.sum():.1%} of its training images, and the "
        f"test split has {available[scarce] or 'none'} of it; use {', or '.join(ways)}."
    )


def _other_split(counts: np.ndarray, source: ImageSource) -> list[str]:
    """The settings that hold out test images of every class instead, where there is such a choice.

    counts: int64 [classes], training images. A client can have as many as are held out of the smallest class, whatever
    its label shares are.
    """
    if getattr(source, "test_split", "none") == "none":
        return []
    smallest = max(round(source.test_fraction * int(counts[counts > 0].min())), 1)  # type: ignore[attr-defined]
    size = min(source.client_test_images, smallest)
    return [f"dataset.test_split=none dataset.client_test_images={size} (held out of the training images)"]


def _possible(counts: np.ndarray, available: np.ndarray, source: ImageSource, smallest: int) -> int:
    """The most test images up to `smallest` that can be asked for; 0 where none are found."""
    for size in range(smallest, max(smallest - TRIES, 0), -1):
        takes = _takes(counts, size, available, source.client_test_rounding)
        if _enough(takes, size, source.least_test_share):
            return size
    return 0
