"""Limits of settings, stated where the setting is declared."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, ClassVar

from fedspa.core.errors import check_choice, check_range


def limited(default: Any = MISSING, *, choices: Iterable[str] = (), **limits: Any) -> Any:
    """A field of a `Limited` class with valid choices, or with limits as `check_range` takes them.

    null is valid for a field that may be null. In a list every item has the limits.
    """
    check = partial(check_choice, options=choices) if choices else partial(check_range, **limits)
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"check": check})
    return field(default=default, metadata={"check": check})


@dataclass
class Limited:
    """A section of the config, or a `Component`. It refuses values outside the limits of its fields.

    A derived class may give a field another default; the limits stay. A class with a `__post_init__` calls this one.
    """

    section: ClassVar[str] = ""
    """The dotted name of the section, for error sentences."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            check, value = _check(type(self), setting.name), getattr(self, setting.name)
            # Types are texts here, since their names may be imported for type checks alone.
            if check is None or (value is None and re.search("None|Optional", str(setting.type))):
                continue
            several = re.search("list|tuple|Sequence", str(setting.type)) and isinstance(value, list | tuple)
            for item in value if several else [value]:
                check(f"{self.section}.{setting.name}".lstrip("."), item)


@dataclass(kw_only=True)
class Component(Limited):
    """An option of a group of the config, such as a data set or a method."""

    name: str = ""
    """The name in the config. An object made in Python gets the name of its class."""


def _check(kind: type, name: str) -> Callable[[str, Any], None] | None:
    """The check of a field, from the nearest class that limits it."""
    declared = (getattr(base, "__dataclass_fields__", {}).get(name) for base in kind.__mro__)
    return next((found.metadata["check"] for found in declared if found and "check" in found.metadata), None)
