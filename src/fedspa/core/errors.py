"""The one exception that a user's mistake raises, and the help it offers."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class UserError(Exception):
    """A mistake of the user: one sentence that says what is wrong, where, and what would be right.

    The command line prints the sentence without a traceback and exits with a code other than 0.
    """


def brief(error: BaseException) -> str:
    """The message of another library's exception, short enough for part of one sentence."""
    text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    line = " ".join((text.strip().splitlines() or [type(error).__name__])[0].split()).rstrip(".")
    return line if len(line) <= 200 else f"{line[:197]}..."


def written(value: object) -> str:
    """A value as a user writes it in the config.

    >>> written([None, True, 0.5, "a"])
    '[null,true,0.5,a]'
    """
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{','.join(map(written, value))}]"
        case Mapping():
            return f"{{{','.join(f'{key}:{written(item)}' for key, item in value.items())}}}"
    return str(value)


FEW = 8
"""The largest number of valid names that an error sentence lists."""


def listed(items: Sequence[object], word: str = "and") -> str:
    """`a, b and c`, or with another word."""
    *others, last = map(str, items)
    return f"{', '.join(others)} {word} {last}" if others else last


def nearest(word: str, options: Iterable[str]) -> str:
    """The tail of an error sentence: the nearest valid names, and the valid ones, or the first of many.

    >>> nearest("dts", ["dst", "none", "rsm"])
    'did you mean dst? (valid: dst, none, rsm)'
    """
    names = sorted(options)
    if not names:
        return "there are none to choose from"
    by_lower = {name.lower(): name for name in names}
    close = [by_lower[name] for name in get_close_matches(word.lower(), by_lower, n=2, cutoff=0.51)]
    few = len(names) <= FEW
    valid = ", ".join(names) if few else f"{', '.join(names[:FEW])} and {len(names) - FEW} others"
    if not close:
        return f"valid are {valid}"
    return f"did you mean {' or '.join(close)}? ({f'valid: {valid}' if few else f'{len(names)} are valid'})"


def check_choice(where: str, value: str, options: Iterable[str]) -> None:
    """Raise `UserError` unless `value` is one of `options`; `where` is the setting's dotted name."""
    names = list(options)
    if value not in names:
        raise UserError(f"{where}={written(value)} is not known: {nearest(written(value), names)}.")


def check_range(
    where: str,
    value: float,
    low: float | None = None,
    high: float | None = None,
    *,
    low_open: bool = False,
    high_open: bool = False,
) -> None:
    """Raise `UserError` unless `value` is finite and in [low, high]. `low_open` and `high_open` exclude a limit."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise UserError(f"{where}={written(value)} is not a number.")
    too_low = low is not None and (value <= low if low_open else value < low)
    too_high = high is not None and (value >= high if high_open else value > high)
    # math.isfinite refuses whole numbers that are too large for a float.
    finite = abs(value) <= sys.float_info.max if isinstance(value, int) else math.isfinite(value)
    if not (too_low or too_high) and finite:
        return
    if high is None:
        wanted = f"{'more than' if low_open else 'at least'} {low}"
    elif low is None:
        wanted = f"{'less than' if high_open else 'at most'} {high}"
    else:
        wanted = f"in {'(' if low_open else '['}{low}, {high}{')' if high_open else ']'}"
    fault = "out of range" if finite else "not a finite number"
    raise UserError(f"{where}={written(value)} is {fault}: it must be {wanted}.")


def difference(tensor: torch.Tensor, like: torch.Tensor) -> str:
    """The first of shape, dtype and device in which a tensor differs from another, in words; "" if there is none."""
    for name in ("shape", "dtype", "device"):
        has, must = (getattr(each, name) for each in (tensor, like))
        if has != must:
            has, must = (list(each) if name == "shape" else each for each in (has, must))
            return f"{name} {has}: it must have {must}".replace("torch.", "")
    return ""
