"""The number of test examples of each class for a client, if the partition gives the client none."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from fedspa.core.errors import UserError
from fedspa.data.source import Source

MOST_ASKED = 2**31
"""A number larger than any test split. Larger numbers give the same result, and their products would not fit 64
bits."""
TRIES = 1000
"""The number of smaller sizes to try for a suggestion."""


def test_counts(
    counts: np.ndarray, available: np.ndarray, source: Source, class_names: Sequence[str] = ()
) -> np.ndarray:
    """The test examples of each class, int64 [clients, classes], for clients that train on `counts` [clients, classes].

    `available`: int64 [classes], the number of test examples of each class. Raises `UserError` if a client would get
    none, or less than `dataset.least_test_share` of the wanted number.
    """
    asked, share, things = source.client_test_images, source.least_test_share, source.things

    def taken(size: int) -> tuple[np.ndarray, int]:
        """The counts for this wanted number, and the number of clients with too few."""
        if source.client_test_rounding == "ceil":
            wanted = -(-counts * min(size, MOST_ASKED) // counts.sum(axis=1, keepdims=True))
            takes = np.minimum(wanted, available)
        else:
            takes = np.stack([largest_fitting(own, min(size, MOST_ASKED), available) for own in counts])
        least = max(Fraction(str(share)) * size, Fraction(1))  # from the text, so that 0.07 x 100 is 7
        return takes, sum(total < least for total in takes.sum(axis=1).tolist())

    takes, few = taken(asked)
    if not few:
        return takes
    client = int(takes.sum(axis=1).argmin())
    got, own = int(takes[client].sum()), counts[client]
    scarce = int(np.where(own > 0, available / np.maximum(own, 1), np.inf).argmin())
    name = class_names[scarce] if class_names else str(scarce)
    ways, one = [], things.removesuffix("s")
    if source.effective_test_size < source.test_size:
        ways.append(f"more than dataset.test_rows={source.test_rows}")
    elif not available[scarce]:
        ways += _other_split(counts.sum(axis=0), source)
        ways.append(f"test {things} of class {name} (or no training {things} of it)")
    if size := next((size for size in range(got, max(got - TRIES, 0), -1) if not taken(size)[1]), 0):
        ways.append(f"dataset.client_test_images={size}")
        ways.append(f"dataset.least_test_share={100 * got // asked / 100:g}")
    raise UserError(
        f"client {client} gets {got or 'no'} test {things if got > 1 else one}, where "
        f"dataset.client_test_images={asked} and dataset.least_test_share={share:g} ask for more (too few for {few} of "
        f"{len(counts)} clients): class {name} is {own[scarce] / own.sum():.1%} of its training {things}, and the "
        f"test split has {available[scarce] or 'none'} of it; use {', or '.join(ways)}."
    )


def largest_fitting(counts: np.ndarray, total: int, available: np.ndarray) -> np.ndarray:
    """The `largest_remainder` of the largest size up to `total` that needs no more than is available of any class.

    All int64 [classes]. The result is zeros if not even one example fits.
    """
    there = counts > 0
    # Each class gets at least the whole part of its quota. Beyond this bound that alone exceeds what is available.
    bound = ((available[there] + 1) * counts.sum() - 1) // counts[there]
    # Below the bound every size is tried: a larger size can give a class fewer examples (the Alabama paradox).
    for size in range(min(total, int(bound.min()), int(available[there].sum())), 0, -1):
        take = largest_remainder(counts, size)
        if (take <= available).all():
            return take
    return np.zeros_like(counts)


def largest_remainder(counts: np.ndarray, total: int) -> np.ndarray:
    """Divide `total` in proportion to `counts` int [classes], in whole numbers that add up to it.

    Each class gets the whole part of its quota, and the largest remainders get one more; a tie goes to the lower class.
    """
    shares, remainders = np.divmod(counts * total, counts.sum())
    rest = total - shares.sum()
    shares[np.argsort(-remainders, kind="stable")[:rest]] += 1
    return shares


def _other_split(counts: np.ndarray, source: Source) -> list[str]:
    """The settings that hold out test examples of every class instead, if the data set has such a choice.

    `counts`: int64 [classes], training examples. A client can have as many test examples as are held out of the
    smallest class, for any label shares.
    """
    if getattr(source, "test_split", "none") == "none":
        return []
    smallest = max(round(source.test_fraction * int(counts[counts > 0].min())), 1)  # type: ignore[attr-defined]
    size = min(source.client_test_images, smallest)
    return [
        f"dataset.test_split=none dataset.client_test_images={size} (held out of the training {source.things})"
    ]
