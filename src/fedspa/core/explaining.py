"""Turns an error of OmegaConf or Hydra into one sentence about the setting that the user wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from importlib import import_module
from inspect import get_annotations
from typing import Any, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.base import Container, Node
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigIndexError,
    ConfigKeyError,
    ConfigTypeError,
    GrammarParseError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from fedspa.core.errors import UserError, listed, nearest, written
from fedspa.core.paths import config_dir

REASONS = {
    r"Interpolation key '(.*)' not found": "the setting {} does not exist or is null",
    r"Unsupported interpolation type (.*)": "there is no resolver {}",
    r"Recursive interpolation detected": "it refers to itself",
    r"KeyError raised .*Environment variable '(.*)' not found.*": "there is no environment variable {}",
    r"(?:TypeError|GrammarParseError) raised .*": "the resolver does not take these arguments",
    r"\w+ raised while resolving interpolation: (.*)": "{}",
}
"""OmegaConf's messages about an interpolation, and the reason to show."""
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def explain(
    error: OmegaConfBaseException, group: str = "", config: Mapping[str, Any] | None = None
) -> UserError:
    """The sentence about an error of OmegaConf, with the setting's dotted name.

    Args:
        error: raised while a config was composed, or while its values got their types.
        group: the part of the config that OmegaConf checked; "" for the whole.
        config: the whole config, if OmegaConf checked a part.
    """
    where = ".".join(part for part in (group, error.full_key) if part)
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return _unknown(error, where, group, config)
    what = str(error).splitlines()[0].rstrip(".")
    if missing := re.search(r"[Mm]issing mandatory value: (.*)", what):
        return without_value(where if isinstance(error, MissingMandatoryValue) else missing[1])
    if isinstance(error, GrammarParseError):
        form = "${<setting>} or ${<resolver>:<values>}"
        return UserError(f"{where} has an interpolation that cannot be read: it is written as {form}.")
    if isinstance(error, InterpolationResolutionError) and not isinstance(error, ValidationError):
        reasons = (
            reason.format(*found.groups())
            for pattern, reason in REASONS.items()
            if (found := re.fullmatch(pattern, what))
        )
        node = error.child_node  # None: the setting refers to one that cannot be resolved
        if node is None and (named := re.search(r"key '(\w+)\.name' not found", what)):
            return without_name(named[1])
        given = where if node is None else f"{where}={node._value()}"
        return UserError(f"{given} cannot be resolved: {next(reasons, what)}.")
    if isinstance(error, ConfigIndexError) or "is not an int" in what:
        return no_item(where)
    if isinstance(error, ConfigTypeError) and "does not support deletion" in what:
        return left_out(where)
    if what.startswith("Cannot merge"):  # a list into a section, or the other way round
        return UserError(
            f"{where} has another form: a section is set key by key, a list is written as [a,b]."
        )
    if isinstance(error, ValidationError) and (typed := _wanted(error, where)):
        return typed
    return UserError(f"{where}: {what}." if where else f"{what}.")


def without_value(where: str) -> UserError:
    """The sentence about a setting that is ???, which means in Hydra that it has no value yet."""
    return UserError(f"{where}=??? has no value: write {where}=<value>.")


def without_name(group: str) -> UserError:
    """The sentence about a component that lacks its name, perhaps in a YAML file of the user."""
    return UserError(f"{group}.name is missing: it must be the name of the option, as in {group}=<name>.")


def no_item(where: str) -> UserError:
    """The sentence about an item that a list does not have."""
    return UserError(f"{where} is no item of the list: write the whole list, as <setting>=[a,b].")


def left_out(where: str) -> UserError:
    """The sentence about a setting that was deleted from the config."""
    return UserError(f"{where} cannot be left out: remove ~{where}.")


def _wanted(error: ValidationError, where: str) -> UserError | None:
    """The sentence about a value of the wrong type; None if OmegaConf does not name the right type."""
    value = error.value
    if section := re.match(r"Merge error: \w+ is not a subclass of (\w+)\. value: (.*)", str(error)):
        # OmegaConf's error names the key and the value only in its text.
        named = [
            key for key in error.parent_node or () if _type(error.parent_node, key).__name__ == section[1]
        ]
        if len(named) != 1:
            return None
        where, value, kind = f"{where}.{named[0]}", section[2], _type(error.parent_node, named[0])
    elif error.child_node is not None:
        kind = error.child_node._metadata.ref_type
    else:  # an item of a list or dict, or a whole section
        kind = error.ref_type if error.key is None else get_args(error.ref_type)[-1]
    if isinstance(value, Node):
        value = OmegaConf.to_container(value) if isinstance(value, Container) else value._value()
    if isinstance(value, dict) and not value and kind in KINDS:  # Hydra's result for <where>.<key>=<value>
        return UserError(f"{where} is {KINDS[kind]}, and holds no settings: write {where}=<value>.")
    given = f"{where}={written(value)}"
    if is_dataclass(kind):
        return UserError(
            f"{given} is no section: set what is in it, as in {where}.{fields(kind)[0].name}=<value>."
        )
    if get_origin(kind) is dict:
        return UserError(f"{given} is no section: set what is in it, as in {where}.<name>=<value>.")
    if get_origin(kind) is list:
        return UserError(f"{given} is not a list, which is written as [a,b].")
    several = (
        f": a run takes one value, a sweep (-m {where}=a,b) runs each" if isinstance(value, list) else ""
    )
    return UserError(f"{given} is not {KINDS[kind]}{several}.") if kind in KINDS else None


def _type(node: Any, key: Any) -> Any:
    return node._get_node(key)._metadata.ref_type


def _unknown(
    error: OmegaConfBaseException, where: str, group: str, config: Mapping[str, Any] | None
) -> UserError:
    """The sentence about a setting that does not exist. It names the right place, or the nearest valid names."""
    key, parent = str(error.key), error.parent_node
    groups = {folder.name for folder in config_dir().iterdir() if folder.is_dir()} - {"hydra"}
    if where in groups:
        return UserError(f"{where} holds no settings: it chooses from conf/{where}, as in {where}=<name>.")
    kind = error.object_type
    if isinstance(kind, type) and key in get_annotations(kind) and "__dataclass_fields__" not in vars(kind):
        return UserError(
            f"{where} is not a setting: write @dataclass(kw_only=True) above the class {kind.__name__}."
        )
    valid = {str(name) for name in parent or ()} - {"_target_", "hydra", key}
    if where.partition(".")[0] in groups and valid <= {"name"}:
        option = f"{group or where.partition('.')[0]}={(parent or {}).get('name')}"
        return UserError(f"{where} is not a setting: {option} has no further settings.")
    if config is None and isinstance(parent, Container):
        config = OmegaConf.to_container(parent._get_root())  # type: ignore[assignment]
    places = (
        {} if where.startswith("hydra") else {place: place.rpartition(".")[2] for place in _names(config)}
    )
    same = sorted(place for place, name in places.items() if name == key and place != where)
    if same:
        return UserError(f"{where} is not a setting: did you mean {listed(same, 'or')}?")
    if error.full_key == error.key and not group:  # groups can be chosen, though not all are keys
        valid |= {"sweep", *groups}
        if not get_close_matches(key.lower(), valid, cutoff=0.7):
            alike = get_close_matches(key.lower(), set(places.values()), n=1, cutoff=0.7)
            if same := sorted(place for place, name in places.items() if name in alike):
                return UserError(f"{where} is not a setting: did you mean {listed(same, 'or')}?")
    return UserError(f"{where} is not a setting: {nearest(key, valid)}.")


def _names(config: Mapping[str, Any] | None, prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings, also of those that no YAML file mentions."""
    node = dict(config or {})
    if target := node.pop("_target_", None):
        node = dict.fromkeys(_options(str(target))) | node
    for key, value in node.items():
        if not prefix and key == "hydra" or prefix and key == "name":
            continue
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _options(target: str) -> list[str]:
    """The options of a fedspa component; none for a class of another package."""
    module, _, name = target.rpartition(".")
    if not module.startswith("fedspa.") or module.startswith("fedspa.models."):  # networks would load torch
        return []
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return []
    return [field.name for field in fields(found)] if is_dataclass(found) else []
