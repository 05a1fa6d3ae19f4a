"""A user's own object as plain values: its class, its arguments, and hashes for all that is not plain."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType
from typing import Any

import numpy as np
import torch

from fedspa.config.checking import PYTHON_CLASS

OURS = ("fedspa", "torch", "numpy", "lightning", "abc", "typing", "collections")
"""Packages whose classes are identified by their name alone."""


def describe(thing: Any) -> dict[str, Any]:
    """The config's record of a user's object: name, class, arguments, hash of the class's source."""
    kind = type(thing)
    return {
        "name": kind.__name__,
        PYTHON_CLASS: path_of(kind),
        **_arguments(thing),
        "source_hash": source_hash(kind),
    }


def describe_model(model: Any, network: torch.nn.Module) -> dict[str, Any]:
    """The config's record of a model: a module with its initial weights, or a function that made `network`."""
    what = type(model) if isinstance(model, torch.nn.Module) else model
    layers = {source_hash(type(layer)) for layer in network.modules()}
    node = {
        "name": getattr(what, "__name__", type(what).__name__),
        PYTHON_CLASS: path_of(what),
        "layers": str(network),
        "source_hash": _digest([source_hash(what), *sorted(layers)]),
    }
    if what is not model:
        node["weights_hash"] = _digest({name: _plain(tensor) for name, tensor in model.state_dict().items()})
    return node


def path_of(thing: Any) -> str:
    """The dotted path of a class or function."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def source_hash(thing: Any) -> str:
    """A hash of the source of a class and its bases, or of a function: 16 hex digits. Called functions of other
    packages are not part of it."""
    if isinstance(thing, partial):
        return _digest([source_hash(thing.func), _plain(thing.args), _plain(thing.keywords)])
    if not isinstance(thing, type):
        return _digest(_source(thing) if inspect.isroutine(thing) else describe(thing))
    own = [base for base in thing.__mro__[:-1] if base.__module__.partition(".")[0] not in OURS]
    return _digest([_source(kind) for kind in own] or path_of(thing))


def _source(thing: Any) -> Any:
    """The text of a class or function; its code if there is no text, as for a class in a notebook."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        pass
    if isinstance(thing, type):
        members = {name: inspect.unwrap(_function(member)) for name, member in vars(thing).items()}
        return {
            name: _source(member) if inspect.isfunction(member) else repr(member)
            for name, member in members.items()
            if inspect.isfunction(member) or isinstance(member, str | int | float | bool | tuple)
        }
    return _code(thing.__code__) if hasattr(thing, "__code__") else path_of(thing)


def _function(member: Any) -> Any:
    """The function of a property, a class method or a static method."""
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


def _code(code: CodeType) -> list[Any]:
    constants = [_code(part) if isinstance(part, CodeType) else repr(part) for part in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]


def _arguments(thing: Any) -> dict[str, Any]:
    """The values of an object: the fields of a dataclass, and all other attributes."""
    values = (
        {field.name: getattr(thing, field.name) for field in fields(thing)} if is_dataclass(thing) else {}
    )
    values |= getattr(thing, "__dict__", {})
    return {key: _plain(value) for key, value in values.items() if key != "name"}


def _plain(value: Any) -> Any:
    """A value in the form of a config: arrays as type, shape and hash, other objects as their record."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.generic():
            return value.item()
        case torch.Tensor():
            return _plain(value.detach().cpu().numpy())
        case np.ndarray():
            digest = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).hexdigest()
            return f"{value.dtype}{list(value.shape)} {digest}"
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case set() | frozenset():
            return sorted(map(str, value))
        case torch.nn.Module():
            return describe_model(value, value)
        case Callable() if inspect.isroutine(value) or isinstance(value, type | partial):
            return {PYTHON_CLASS: path_of(value), "source_hash": source_hash(value)}
    return describe(value)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
