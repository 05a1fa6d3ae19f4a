"""Reads command lines of `key=value` words, for the commands that compose no config."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedspa.core.errors import UserError, nearest


def key_values(arguments: Iterable[str], keys: Sequence[str]) -> dict[str, str]:
    """The last value of each key. Raises `UserError` for a word that is not one of these options."""
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise UserError(f"{argument} cannot be read: an option is written as key=value.")
        if key not in keys:
            raise UserError(f"{key} is not an option: {nearest(key, keys)}.")
        if not value:
            raise UserError(f"{key}= has no value.")
        given[key] = value
    return given
