"""Separates the arguments of `fedspa.run` and `fedspa.Federation` into settings and objects."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from fedspa.config.composing import GROUPS
from fedspa.core.components import KINDS
from fedspa.core.errors import UserError, brief, nearest
from fedspa.core.settings import Config, FederationSettings, TrainingSettings

SHORT = {
    **{field.name: f"training.{field.name}" for field in fields(TrainingSettings)},
    **{field.name: f"federation.{field.name}" for field in fields(FederationSettings)},
    "batchnorm": "model.batchnorm",
    "val_fraction": "dataset.val_fraction",
    "public_fraction": "dataset.public_fraction",
}
"""Settings that an argument may set without their section: lr=0.1 is training={"lr": 0.1}."""
del SHORT["clients"]  # the clients of the user's own data
OBJECTS = ("model", "method", "mask", "layer_sparsity", "server_optimizer")
"""Groups of the config that accept an object of the user."""


def check_names(settings: Mapping[str, Any], own: tuple[str, ...]) -> None:
    """Raise `UserError` for an unknown argument. `own`: arguments that are not settings."""
    sections = {field.name for field in fields(Config)}
    known = {*sections, *GROUPS, *SHORT, *own}
    for name in settings:
        if name not in known and name not in ("hydra", "sweep"):
            close = nearest(name, known).partition(" (valid")[0]
            if "did you mean" not in close:
                shown = ", ".join(sorted({*own, *OBJECTS, *SHORT}))
                close = f"valid are {shown}, and the sections and groups of the config"
            raise UserError(f"{name} is not an argument: {close}.")


def told_apart(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the config, without short names, and the user's own objects by group."""
    config: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for name, value in settings.items():
        if name in OBJECTS and _is_object(value):
            objects[name] = value
        elif name not in SHORT:
            config[name] = value
    for name in SHORT.keys() & settings.keys():
        section, _, key = SHORT[name].partition(".")
        given = settings.get(section, {})
        if isinstance(given, Mapping) and key in given:
            raise UserError(f"{name} is set twice, also by {section}={given!r}: leave one out.")
        before = config.get(section, {})
        if section in objects or not isinstance(before, Mapping):  # a setting beside an object or a choice
            config[f"{section}.{key}"] = settings[name]
        else:
            config[section] = {**before, key: settings[name]}
    return config, objects


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
            text = re.sub(rf"\b{re.escape(SHORT[name])}\b", name, text)
        if text == str(error):
            raise
        for word, value in {"true": True, "false": False, "null": None}.items():
            text = re.sub(rf"(?<==){word}\b", str(value), text)
        raise UserError(text) from error
