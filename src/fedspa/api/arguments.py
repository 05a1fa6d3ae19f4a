"""Separates the arguments of `fedspa.run` and `fedspa.Federation` into settings and objects."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from fedspa.config.composing import as_words, parsed
from fedspa.core.components import KINDS
from fedspa.core.errors import UserError, brief
from fedspa.core.settings import FederationSettings, TrainingSettings

FRACTIONS = ("val_fraction", "public_fraction")
"""The settings of the section dataset that the user's own arrays have too."""
SHORT = {
    **{field.name: f"training.{field.name}" for field in fields(TrainingSettings)},
    **{field.name: f"federation.{field.name}" for field in fields(FederationSettings)},
    "batchnorm": "model.batchnorm",
    **{name: f"dataset.{name}" for name in FRACTIONS},
}
"""Settings that an argument may set without their section: lr=0.1 is training={"lr": 0.1}."""
del SHORT["clients"]  # the clients of the user's own data
FOLDER = "hydra.run.dir"
"""The command line's name of the argument folder."""
OBJECTS = ("model", "method", "mask", "layer_sparsity", "server_optimizer")
"""Groups of the config that accept an object of the user."""


def as_path(where: str, value: Any) -> Path:
    """A path from Python. Raises `UserError` for anything else."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise UserError(f"{where}={value!r} is no path: give a text or a pathlib.Path.")
    return Path(text)


def without_fractions(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The words that do not set `FRACTIONS`, and the values of those that do, by name."""
    others, found = list[str](), dict[str, Any]()
    names = {f"dataset.{name}": name for name in FRACTIONS}
    for word, override in zip(words, parsed(words), strict=True):
        name = names.get(override.key_or_group)
        if name is None or override.is_sweep_override():
            others.append(word)
        elif name in found:
            raise UserError(f"{name} is set twice: leave one out.")
        else:
            found[name] = override.value()
    return others, found


def words_and_objects(settings: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The settings in words, with their sections, and the user's own objects by group."""
    objects = {group: settings[group] for group in OBJECTS if _is_object(settings.get(group))}
    return as_words({SHORT.get(key, key): settings[key] for key in settings if key not in objects}), objects


def _is_object(value: Any) -> bool:
    """True if a value is an object of a class, and not a setting."""
    return not isinstance(value, str | Path | Mapping | list | tuple | int | float | None)


def component(group: str, value: Any) -> Any:
    """A copy of the user's object, named after its class, as a run takes it.

    Raises `UserError` for an object of another kind.
    """
    module, _, name = KINDS[group].rpartition(".")
    kind = getattr(import_module(module), name)
    if isinstance(value, type):
        raise UserError(
            f"{group}={value.__name__} is a class: give an object of it, as in {group}={value.__name__}(...)."
        )
    if not isinstance(value, kind):
        raise UserError(
            f"{group}={type(value).__name__}(...) is not an object for this place: its class must be derived from "
            f"{module}.{name}."
        )
    own = copy.copy(value)
    object.__setattr__(own, "name", type(value).__name__)
    return own


def model_maker(model: Any) -> Callable[[], Any]:
    """A function without arguments that makes the network. For a module it returns a copy, with its weights.

    Raises `UserError` if the model is neither a module nor a function that makes one.
    """
    from torch import nn

    if isinstance(model, nn.Module):
        initial = copy.deepcopy(model)  # the user may train the module later
        return lambda: copy.deepcopy(initial)
    if not callable(model):
        raise UserError(
            f"model={model!r} is no model: give a torch.nn.Module, or a function without arguments that makes one."
        )
    what = f"model={getattr(model, '__name__', model)}"

    def make() -> nn.Module:
        try:
            network = model()
        except Exception as error:  # any error of the user's code
            raise UserError(
                f"{what} is called without arguments to make the network, and raised {type(error).__name__} "
                f"({brief(error)}): give a module, or a function that needs none."
            ) from error
        if not isinstance(network, nn.Module):
            raise UserError(f"{what} makes a {type(network).__name__}: it must make a torch.nn.Module.")
        return network

    return make


@contextmanager
def in_python(names: Collection[str]) -> Iterator[None]:
    """Rewrite errors: settings become the names of arguments, and values Python values."""
    try:
        yield
    except UserError as error:
        text = str(error)
        if "rounds" in names:
            text = re.sub(r"\bfederation\.clients=(\d+)", r"\1 clients", text)
        for name in names:
            text = re.sub(rf"\b{re.escape(SHORT.get(name, FOLDER))}\b", name, text)
        if text == str(error):
            raise
        for word, value in {"true": True, "false": False, "null": None}.items():
            text = re.sub(rf"(?<==){word}\b", str(value), text)
        raise UserError(text) from error
