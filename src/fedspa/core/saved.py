"""Saved state under suspicion: every value is looked at before it is taken up.

A checkpoint's checksum says that it is what was written, not who wrote it. A state of another shape, type, length
or range than the run can have is refused by one sentence that names the place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    from fedspa.core.packed_mask import PackedMask


class Misfit(ValueError):
    """A saved value that cannot be of this run: what it is, and what it would have to be."""


class Saved:
    """A value of a saved state, and where it is there: `saved["costs"]["up_bytes"].integer()`.

    Every method raises `Misfit` where the value is not what is asked for.
    """

    __slots__ = ("value", "where")

    def __init__(self, value: Any, where: str) -> None:
        self.value, self.where = value, where

    def misfit(self, wanted: str, found: str | None = None) -> Misfit:
        """What to raise: `wanted` and `found` complete "must be ... , not ..."."""
        return Misfit(f"{self.where} must be {wanted}, not {found or _short(self.value)}")

    def __getitem__(self, key: str) -> Saved:
        if key not in self.mapping():
            raise Misfit(f"{self.where} has no {key}")
        return Saved(self.value[key], f"{self.where}.{key}")

    def mapping(self, keys: Iterable[str] | None = None) -> dict[Any, Any]:
        """A dict, with just these keys where they are given."""
        if not isinstance(self.value, dict):
            raise self.misfit("a mapping")
        if keys is not None and (differ := set(keys) ^ set(self.value)):
            raise Misfit(f"{self.where} must have the keys {_list(keys)}: {_list(differ)} differ")
        return self.value

    def items(self) -> Iterator[tuple[Saved, Saved]]:
        """The keys and values of a dict."""
        for key, value in self.mapping().items():
            yield Saved(key, f"a key of {self.where}"), Saved(value, f"{self.where}.{key}")

    def sequence(self, length: int | None = None, most: float = math.inf) -> list[Saved]:
        """The items of a list, which has that length, or at most `most` items."""
        if not isinstance(self.value, list | tuple):
            raise self.misfit("a list")
        if len(self.value) > most or length not in (None, len(self.value)):
            wanted = f"{length} items" if length is not None else f"at most {most} items"
            raise self.misfit(f"a list of {wanted}", f"one of {len(self.value)}")
        return [Saved(item, f"{self.where}[{index}]") for index, item in enumerate(self.value)]

    def text(self, among: Iterable[str] | None = None) -> str:
        if not isinstance(self.value, str) or (among is not None and self.value not in among):
            raise self.misfit("a text" if among is None else f"one of {_list(among)}")
        return self.value

    def integer(self, low: int = 0, high: float = math.inf) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.misfit(f"a whole number from {low}{'' if high == math.inf else f' to {high}'}")
        return self.value

    def number(self, low: float = -math.inf, *, finite: bool = True) -> float:
        """A number; a whole one stays one."""
        is_number = type(self.value) in (int, float) and (not finite or math.isfinite(self.value))
        if not is_number or self.value < low:
            raise self.misfit("a number" if low == -math.inf else f"a number from {low:g}")
        return self.value

    def optional(self) -> Saved | None:
        """None where it is None."""
        return None if self.value is None else self

    def plain(self) -> Any:
        """Nothing but texts, numbers, booleans and None, in lists and dicts."""
        if isinstance(self.value, dict):
            return {key: Saved(value, f"{self.where}.{key}").plain() for key, value in self.value.items()}
        if isinstance(self.value, list | tuple):
            return [item.plain() for item in self.sequence()]
        if self.value is not None and not isinstance(self.value, str | bool | int | float):
            raise self.misfit("a plain value")
        return self.value

    def array(self, dtype: str, length: int | None = None) -> np.ndarray:
        """A numpy array [length] of that dtype."""
        import numpy as np

        value = self.value
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
            raise self.misfit(f"an array of {dtype}")
        if length not in (None, len(value)):
            raise self.misfit(f"an array of {length} numbers")
        return value

    def tensor(self, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor, of that dtype and shape where they are given; its floating numbers are finite."""
        import torch

        value = self.value
        if not isinstance(value, torch.Tensor):
            raise self.misfit("a tensor")
        if dtype not in (None, value.dtype) or (shape is not None and list(value.shape) != list(shape)):
            wanted = f"{dtype or value.dtype} {list(value.shape if shape is None else shape)}"
            raise self.misfit(f"a tensor of {wanted}")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise self.misfit("finite", "infinite or NaN in places")
        return value

    def mask(self, length: int | None = None) -> PackedMask:
        """A packed mask, over so many parameters where that is given; nothing lies behind them."""
        import torch

        from fedspa.core.packed_mask import PackedMask

        value = self.value
        if not isinstance(value, PackedMask) or length not in (None, value.length):
            raise self.misfit("a mask" if length is None else f"a mask of {length} parameters")
        unused = 8 * len(value.bits) - value.length
        if (
            value.bits.dtype != torch.uint8
            or not 0 <= unused < 8
            or (unused and int(value.bits[-1]) % (1 << unused))
        ):
            raise self.misfit("a mask", "one with bits behind its last parameter")
        return value


def _layout(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}"


def _list(names: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, names)))


def _short(value: Any) -> str:
    """A value in a few words."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of {_layout(value)}"
    if hasattr(value, "length"):
        return f"a mask of {value.length} parameters"
    if isinstance(value, Mapping | list | tuple):
        return f"a {type(value).__name__} of {len(value)} items"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
