"""Reads command lines of `key=value` words, for the commands that compose no config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedspa.core.errors import UserError, nearest
from fedspa.core.explaining import explain

Options = TypeVar("Options")


def read_options(form: type[Options], words: Iterable[str]) -> Options:
    """The options of a command line. The dataclass `form` declares their names, types and defaults.

    A list is written as a,b or [a,b].

    Raises `UserError` for a word that is not one of these options, or a value of another type.
    """
    options = OmegaConf.structured(form)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{word} cannot be read: an option is written as key=value.")
        if key not in options:
            raise UserError(f"{key} is not an option: {nearest(key, options)}.")
        if not value:
            raise UserError(f"{key}= has no value.")
        try:
            options[key] = _items(value) if OmegaConf.is_list(options[key]) else value
        except OmegaConfBaseException as error:
            raise explain(error) from error
    try:
        return cast(Options, OmegaConf.to_object(options))
    except OmegaConfBaseException as error:
        raise explain(error) from error


def _items(text: str) -> list[str]:
    return [item for item in text.strip("[]").split(",") if item.strip()]
