"""Makes components from the config: checks the class of a node and the types of its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from inspect import isabstract
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedspa.core.errors import UserError, brief, written
from fedspa.core.explaining import explain
from fedspa.core.lazy_torch import torch_deferred
from fedspa.core.plugin_packages import packages as plugin_packages

KINDS = {
    "model": "torch.nn.Module",
    "dataset": "fedspa.data.source.Source",
    "partition": "fedspa.partition.base.AnyPartition",
    "layer_sparsity": "fedspa.layer_sparsity.base.LayerSparsity",
    "mask": "fedspa.masks.base.MaskSearcher",
    "server_optimizer": "fedspa.server_optimizers.base.ServerOptimizer",
    "method": "fedspa.methods.base.Method",
    "hardware": "fedspa.training.hardware.Hardware",
    "engine": "fedspa.training.choice.EngineChoice",
    "metrics": "fedspa.metrics.base.Metric",
    "loggers": "fedspa.core.tracker.Tracker",
}
"""The base class of each group of components."""


def find_class(where: str, target: str | None, trusted: Sequence[str]) -> Any:
    """The class that `<where>._target_` names. Raises `UserError` unless it is one of a trusted package."""
    found = find_object(f"{where}._target_", target, trusted)
    if not isinstance(found, type):
        packages = ("fedspa", *trusted, *plugin_packages())
        raise UserError(f"{where}._target_={written(target)} is not a class of {' or '.join(packages)}.")
    return found


def known_class(where: str, target: str | None, trusted: Sequence[str] = ()) -> Any | None:
    """The class that `<where>._target_` names, found without torch where it does not need it.

    None unless it is one of fedspa, of an installed plug-in or of a `trusted` package: a reader of old configs imports
    nothing else.
    """
    with torch_deferred(), suppress(UserError):
        return find_class(where, target, trusted)
    return None


def find_object(setting: str, target: str | None, trusted: Sequence[str]) -> Any:
    """The class or function that a setting names. Raises `UserError` unless it is one of a trusted package."""
    if target is None:
        key = setting.rpartition(".")[2]
        raise UserError(f"{setting} is missing: it must name a class, as in {key}: package.module.Class.")
    packages = ("fedspa", *trusted, *plugin_packages())
    module, _, name = str(target).rpartition(".")
    refusal = f"{setting}={written(target)} is not a class of {' or '.join(packages)}"
    if module.partition(".")[0] not in packages:
        raise UserError(f"{refusal}: a package of your own must be named in trusted_packages.")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{refusal}: {brief(error)}.") from error
    except Exception as error:  # any error of the module itself
        raise UserError(
            f"{setting}: the module {module} fails when it is imported ({type(error).__name__}: {brief(error)})."
        ) from error
    if not callable(found) or str(getattr(found, "__module__", "")).partition(".")[0] not in packages:
        raise UserError(f"{refusal}.")
    return found


def component(
    where: str, node: dict[str, Any], trusted: list[str], config: Mapping[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """The object that a node of the config describes (None for mask=none), and its typed options.

    `config`: the whole config. The error message searches it for the right place of a misplaced option.
    """
    if not isinstance(node, dict):
        raise UserError(f"{where}={written(node)} is no component: it must be a _target_ and its options.")
    options = dict(node)
    target = options.pop("_target_", None)
    if where == "mask" and node["name"] == "none":
        return None, dict(node)
    found = find_class(where, target, trusted)
    check_kind(where, found)
    component, typed = build(where, found, options, config)
    return component, {"_target_": target, **typed}


def check_kind(where: str, found: type) -> None:
    """Raise `UserError` for a class that does not belong to this group. The check comes before the class is called."""
    module, _, name = KINDS[where.partition(".")[0]].rpartition(".")
    kind = getattr(import_module(module), name)
    what = f"{where}._target_={found.__module__}.{found.__qualname__}"
    if not issubclass(found, kind):
        raise UserError(f"{what} is not a class for this place: it must be a {name} of {module}.")
    if isabstract(found):
        missing = ", ".join(sorted(vars(found)["__abstractmethods__"]))
        raise UserError(f"{what} lacks {missing}, which a class derived from {name} must define.")


def build(
    where: str, schema: type, options: dict[str, Any], config: Mapping[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """An object of the dataclass `schema`, and its options as plain values of the fields' types."""
    try:
        typed = OmegaConf.merge(OmegaConf.structured(schema), options)
        plain: dict[str, Any] = OmegaConf.to_container(typed)  # type: ignore[assignment]
        _check_forms(where, plain, options)
        return OmegaConf.to_object(typed), plain
    except OmegaConfBaseException as error:
        raise explain(error, where, config) from error


def _check_forms(where: str, typed: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise `UserError` for errors that OmegaConf lets pass: a number as a boolean, and a list in a list."""
    for key, value in typed.items():
        raw, name = given.get(key, value), f"{where}.{key}" if where else key
        if isinstance(value, dict) and isinstance(raw, dict):
            _check_forms(name, value, raw)
        elif isinstance(value, bool) and not isinstance(raw, bool):
            raise UserError(f"{name}={written(raw)} is not true or false.")
        elif isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
            raise UserError(f"{name}={written(raw)} is not a plain list, which is written as [a,b].")
