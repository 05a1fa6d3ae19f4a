"""From the config that Hydra composed to a checked `Plan`: typed values, built components, one hash.

Nothing in here needs torch, so a mistake in the config is answered within a second. The network is the
exception: it is built by `build_model`, when the run has begun.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from fractions import Fraction
from importlib import import_module
from inspect import isabstract
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, AnyNode, BooleanNode, DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
)

from fedspa.errors import UserError, brief, check_choice, nearest
from fedspa.paths import project_root
from fedspa.plugins import packages as plugin_packages
from fedspa.plugins import register_plugins
from fedspa.records import ACCURACY
from fedspa.settings import Config

if TYPE_CHECKING:
    from torch import nn

    from fedspa.data.source import ImageSource
    from fedspa.engines.choice import EngineChoice
    from fedspa.layer_sparsity.base import LayerSparsity
    from fedspa.metrics.base import Metric
    from fedspa.running.hardware import Hardware
    from fedspa.weights import ParameterSpace

ONE_EACH = ("dataset", "partition", "layer_sparsity", "mask", "method", "hardware", "engine")
"""Groups that give one component."""
SEVERAL = ("metrics", "loggers")
"""Parts of the config that hold any number of components, by name."""
KINDS = {
    "model": "torch.nn.Module",
    "dataset": "fedspa.data.source.ImageSource",
    "partition": "fedspa.partition.base.AnyPartition",
    "layer_sparsity": "fedspa.layer_sparsity.base.LayerSparsity",
    "mask": "fedspa.masks.base.MaskSearcher",
    "method": "fedspa.methods.base.Method",
    "hardware": "fedspa.running.hardware.Hardware",
    "engine": "fedspa.engines.choice.EngineChoice",
    "metrics": "fedspa.metrics.base.Metric",
    "loggers": "fedspa.records.Tracker",
}
"""What a component is, by its group."""
ONE_OF_MANY = {
    "fedspa.models.timm_network.timm_network": ("timm", "name"),
    "fedspa.models.dotted_network.dotted_network": ("dotted", "path"),
}
"""Options of the group `model` that stand for any number of networks, and the setting that says which."""


@dataclass(frozen=True)
class Plan:
    """A run that can begin: every setting is typed and checked, every component is built."""

    settings: Config
    """`settings.sparsity` is what the method uses: 0 for one that trains dense."""
    dataset: ImageSource
    partition: Any
    layer_sparsity: LayerSparsity
    mask: Any
    """The mask searcher, or None for a dense method."""
    method: Any
    metrics: dict[str, Metric]
    loggers: dict[str, Any]
    hardware: Hardware
    engine: EngineChoice
    resolved: dict[str, Any]
    """The whole config as plain values, interpolations resolved."""

    def active_counts(self, space: ParameterSpace) -> list[int] | None:
        """Active coordinates of each tensor under a client's mask; None for a method without a mask searcher.

        Running statistics are never pruned, and count for no budget.
        """
        if not self.method.uses_mask:
            return None
        density = 1 - Fraction(str(self.settings.sparsity))  # of the decimal that was written: 1 - 0.8 is 0.2
        pruned = space.parameters
        active = self.layer_sparsity.active_counts(pruned.shapes, density, pruned.names)
        return [*active, *space.running.sizes]

    @property
    def names(self) -> dict[str, str]:
        """The option chosen in each group; of a network that is not ours also which: timm:resnet18."""
        names = {group: self.resolved[group]["name"] for group in ("model", *ONE_EACH)}
        model = self.resolved["model"]
        option, setting = ONE_OF_MANY.get(model["_target_"], (None, ""))
        return names | {"model": f"{option}:{model.get(setting)}"} if option else names

    @property
    def config_hash(self) -> str:
        """Equal for runs that must give equal results."""
        return config_hash(self.resolved)


def config_dir() -> Path:
    """The folder of YAML files: conf/ of the clone, or the copy inside the installed package."""
    package = Path(__file__).resolve().parent
    clone = package.parents[1] / "conf"
    return clone if clone.is_dir() else package / "conf"


def register(settings: type[Config] = Config) -> None:
    """Make the schema and the resolvers that conf/ uses known to Hydra and OmegaConf."""
    schema = OmegaConf.structured(settings)
    for group in ("model", *ONE_EACH, *SEVERAL):
        # Hydra would refuse options that no YAML mentions; `check` knows all that a component has.
        OmegaConf.set_struct(schema[group], False)
    _leave_switches_to_check(schema)
    register_plugins(config_dir())
    ConfigStore.instance().store(name="schema", node=schema)
    OmegaConf.register_new_resolver("project_root", lambda: str(project_root()), replace=True)
    OmegaConf.register_new_resolver("times", lambda one, other: one * other, replace=True)
    OmegaConf.register_new_resolver("last_part", lambda path: Path(str(path or "folder")).name, replace=True)
    OmegaConf.register_new_resolver("file_name", lambda name: str(name).replace("/", "--"), replace=True)
    OmegaConf.register_new_resolver("used_sparsity", _used_sparsity, replace=True)


def _leave_switches_to_check(node: DictConfig) -> None:
    """Let Hydra take anything for the schema's true-or-false settings: it would turn 2 into true without a word."""
    for key in node:
        child = node._get_node(key)
        if isinstance(child, BooleanNode):
            node._content[key] = AnyNode(child._value(), key=key, parent=node)  # type: ignore[index]
        elif isinstance(child, DictConfig):
            _leave_switches_to_check(child)


def _used_sparsity(*, _root_: DictConfig) -> float:
    """The sparsity that a run's name may claim: 0 for a method that trains dense."""
    try:
        method = find_class("method", _root_.method._target_, _root_.trusted_packages)
    except UserError:  # `check` will tell of it
        return _root_.sparsity
    return _root_.sparsity if method.uses_sparsity else 0.0


def check(config: DictConfig) -> Plan:
    """Type, build and check everything but the network. Raises `UserError` for the first mistake.

    A class named by the config must come from fedspa or from one of `trusted_packages`.
    """
    _check_named(OmegaConf.to_container(config))  # type: ignore[arg-type]
    try:
        values: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise explain(error) from error
    schema = OmegaConf.get_type(config)  # that of the command; dict for the config that a run recorded
    settings, resolved = _build("", Config if schema in (None, dict) else schema, values)
    trusted = settings.trusted_packages
    parts: dict[str, Any] = {}
    for group in ONE_EACH:
        parts[group], resolved[group] = _component(group, values[group], trusted)
    for group in SEVERAL:
        built = {name: _component(f"{group}.{name}", node, trusted) for name, node in values[group].items()}
        parts[group] = {name: component for name, (component, _) in built.items()}
        resolved[group] = {name: plain for name, (_, plain) in built.items()}
    if not parts["method"].uses_sparsity:
        settings.sparsity = resolved["sparsity"] = 0.0
    plan = Plan(settings=settings, resolved=resolved, **parts)
    _check_together(plan)
    return _described(plan)


def _check_named(values: dict[str, Any]) -> None:
    """Raise `UserError` where a component, of a YAML file of a user's own perhaps, lacks its name or its class."""
    for group in ("model", *ONE_EACH):
        node = values.get(group)
        if not isinstance(node, dict) or not node:
            raise UserError(f"{group} is missing: choose one, as in {group}=<a file of conf/{group}>.")
        if node.get("name") is None:
            raise UserError(f"{group}.name is missing: it must be what {group}=<name> calls it.")
        if "_target_" not in node and (group, node["name"]) != ("mask", "none"):
            raise UserError(f"{group}._target_ is missing: it must be the dotted path of its class.")
    for group in SEVERAL:
        nodes = values.get(group)
        if not isinstance(nodes, dict):
            raise UserError(f"{group} is missing: it must hold any number of components by name.")
        for name, node in nodes.items():
            if isinstance(node, dict) and "_target_" not in node:
                raise UserError(
                    f"{group}.{name}._target_ is missing: it must be the dotted path of its class."
                )


def _described(plan: Plan) -> Plan:
    """The plan with all that its data says: last, for it may take a download."""
    partition = plan.partition.described()
    dataset = plan.dataset.described(getattr(partition, "column", None))
    for group, part in (("partition", partition), ("dataset", dataset)):
        if part is not getattr(plan, group):
            facts = {"_target_": plan.resolved[group]["_target_"], **asdict(part)}
            plan.resolved[group] = facts
    return replace(plan, partition=partition, dataset=dataset)


def _check_together(plan: Plan) -> None:
    """What no component can see alone."""
    method, mask = plan.names["method"], plan.names["mask"]
    if plan.method.uses_mask and plan.mask is None:
        raise UserError(f"method={method} needs masks, but mask={mask}: use mask=dst or another searcher.")
    if plan.mask is not None and not plan.method.uses_mask:
        raise UserError(f"method={method} trains dense, so mask={mask} has no meaning: use mask=none.")
    plan.method.check_training(plan.settings.training)
    if plan.settings.theory.every and plan.mask is None:
        raise UserError(
            f"theory.every={plan.settings.theory.every} needs a mask searcher, which method={method} does not use: "
            "set it to 0."
        )
    if plan.settings.faults.corruption and plan.settings.federation.wire is None:
        raise UserError(
            f"faults.corruption={plan.settings.faults.corruption} needs messages whose bits can flip: "
            "set federation.wire=fp32 (or fp16, bf16)."
        )
    _check_model(plan.resolved["model"])
    if ACCURACY not in plan.metrics:
        names = ",".join([ACCURACY, *plan.metrics])
        raise UserError(f"metric has no {ACCURACY}, which the summary is about: use metric=[{names}].")
    path = plan.resolved["dataset"].get("path")
    if path is not None:
        try:
            exists = Path(path).expanduser().exists()
        except (OSError, RuntimeError, ValueError) as error:  # no permission, no such home, no path at all
            raise UserError(f"dataset.path={path} cannot be read ({brief(error)}).") from error
        if not exists:
            raise UserError(f"dataset.path={path} does not exist: it must be the data set's folder or file.")


def _check_model(model: dict[str, Any]) -> None:
    """What can be said of the network before torch is loaded."""
    if model.get("batchnorm") is not None:
        check_choice("model.batchnorm", model["batchnorm"], ("average", "groupnorm"))


def config_hash(resolved: dict[str, Any]) -> str:
    """SHA-256 (16 hex digits) of everything that decides a run's results.

    Left out: the run's name, where data lies and what it holds, what computes, and what is logged or kept.
    Of what computes only the type of its numbers counts.
    """
    content = _decisive(resolved)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _decisive(resolved: dict[str, Any]) -> dict[str, Any]:
    left_out = ("name", "hardware", "engine", "loggers", "save", "theory", "dry_run", "checkpoint", "resume")
    content = {f.name: resolved[f.name] for f in fields(Config) if f.name not in left_out}
    for group in ("dataset", "partition"):
        content[group] = {key: value for key, value in resolved[group].items() if key != "path"}
    content["hardware"] = {"precision": resolved["hardware"]["precision"]}
    return content


def what_differs(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Why a run with the resolved config `now` cannot go on where one with `before` stopped: "seed (0 there, 1 here)".

    Beside what decides results: what a run gathers from its first round on.
    """

    def flat(node: Any, name: str) -> dict[str, Any]:
        if not isinstance(node, dict):
            return {name: node}
        return {
            k: v
            for key, part in node.items()
            for k, v in flat(part, f"{name}.{key}" if name else key).items()
        }

    def compared(config: dict[str, Any]) -> dict[str, Any]:
        gathered = {"save": {"local": config["save"]["local"]}, "theory": config["theory"]}
        return flat({**_decisive(config), **gathered}, "")

    try:
        one, other = compared(before), compared(now)
    except (KeyError, TypeError):  # a config of another version
        return ["settings that another version of fedspa wrote"]
    keys = [key for key in one | other if one.get(key) != other.get(key) or (key in one) != (key in other)]
    return [f"{key} ({one.get(key)} there, {other.get(key)} here)" for key in keys]


def build_model(plan: Plan, channels: int, image_size: int, classes: int) -> nn.Module:
    """The network for images [channels, image_size, image_size].

    Raises `UserError` for an option that its constructor does not have, or of another type.
    """
    from fedspa.models.batchnorm import with_batchnorm
    from fedspa.models.image_size import check_forward

    make, arguments = model_call(plan, channels, image_size, classes)
    network = with_batchnorm(make(**arguments), plan.resolved["model"].get("batchnorm"))
    check_forward(plan.names["model"], network, channels, image_size, classes)
    return network


def model_call(
    plan: Plan, channels: int, image_size: int, classes: int
) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    """What makes the network for images [channels, image_size, image_size], and with which arguments: plain values.

    Raises `UserError` for an option that it does not have, or of another type.
    """
    options = {key: value for key, value in plan.resolved["model"].items() if key != "_target_"}
    make = find_object("model._target_", plan.resolved["model"]["_target_"], plan.settings.trusted_packages)
    if isinstance(make, type):
        _check_kind("model", make)
    signature = inspect.signature(make).parameters
    data = {"channels": channels, "image_size": image_size, "classes": classes}
    given = data | {"trusted_packages": plan.settings.trusted_packages}
    options.pop("batchnorm", None)
    if "name" not in signature:
        del options["name"]
    types = get_type_hints(getattr(make, "__init__") if isinstance(make, type) else make)  # noqa: B009
    parameters = [
        (name, types.get(name, Any), MISSING if option.default is option.empty else option.default)
        for name, option in signature.items()
        if name not in given
    ]
    schema = make_dataclass(make.__name__, parameters)
    _, typed = _build("model", schema, options)
    return make, {**{name: value for name, value in given.items() if name in {*data, *signature}}, **typed}


def find_class(where: str, target: str | None, trusted: list[str]) -> Any:
    """The class that `<where>._target_` names. Raises `UserError` unless it is one of a trusted package."""
    found = find_object(f"{where}._target_", target, trusted)
    if not isinstance(found, type):
        packages = ("fedspa", *trusted, *plugin_packages())
        raise UserError(f"{where}._target_={target} is not a class of {' or '.join(packages)}.")
    return found


def find_object(setting: str, target: str | None, trusted: list[str]) -> Any:
    """The class or function that a setting names. Raises `UserError` unless it is one of a trusted package."""
    packages = ("fedspa", *trusted, *plugin_packages())
    module, _, name = str(target).rpartition(".")
    refusal = f"{setting}={target} is not a class of {' or '.join(packages)}"
    if module.partition(".")[0] not in packages:
        raise UserError(f"{refusal}: a package of your own must be named in trusted_packages.")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{refusal}: {brief(error)}.") from error
    except Exception as error:  # whatever a package of others does when it is imported
        raise UserError(
            f"{setting}: the package {module.partition('.')[0]} fails when it is imported ({type(error).__name__}: "
            f"{brief(error)})."
        ) from error
    if not callable(found) or str(getattr(found, "__module__", "")).partition(".")[0] not in packages:
        raise UserError(f"{refusal}.")
    return found


def _component(where: str, node: dict[str, Any], trusted: list[str]) -> tuple[Any, dict[str, Any]]:
    """The object that a node of the config describes (None for mask=none), with its typed options."""
    if not isinstance(node, dict):
        raise UserError(f"{where}={node} is no component: it must be a _target_ and its options.")
    options = dict(node)
    target = options.pop("_target_", None)
    if where == "mask" and target is None:
        return None, dict(node)
    found = find_class(where, target, trusted)
    _check_kind(where, found)
    component, typed = _build(where, found, options)
    return component, {"_target_": target, **typed}


def _check_kind(where: str, found: type) -> None:
    """Raise `UserError` for a class that is no component of this group: any other must not even be made."""
    module, _, name = KINDS[where.partition(".")[0]].rpartition(".")
    kind = getattr(import_module(module), name)
    what = f"{where}._target_={found.__module__}.{found.__qualname__}"
    if not issubclass(found, kind):
        raise UserError(f"{what} is not a class for this place: it must be a {name} of {module}.")
    if isabstract(found):
        raise UserError(f"{what} is what such classes have in common: it must be one of them.")


def _build(where: str, schema: type, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An object of the dataclass `schema`, and its options as plain values of the fields' types."""
    try:
        typed = OmegaConf.merge(OmegaConf.structured(schema), options)
        plain: dict[str, Any] = OmegaConf.to_container(typed)  # type: ignore[assignment]
        _check_switches(where, plain, options)
        return OmegaConf.to_object(typed), plain
    except OmegaConfBaseException as error:
        raise explain(error, where) from error


def _check_switches(where: str, typed: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise `UserError` where a true-or-false setting was given as anything else, which OmegaConf converts."""
    for key, value in typed.items():
        told, name = given.get(key, value), f"{where}.{key}" if where else key
        if isinstance(value, dict) and isinstance(told, dict):
            _check_switches(name, value, told)
        elif isinstance(value, bool) and not isinstance(told, bool):
            raise UserError(f"{name}={told} is not true or false.")


def explain(error: OmegaConfBaseException, group: str = "") -> UserError:
    """What OmegaConf found wrong, as one sentence with the setting's dotted name."""
    where = ".".join(part for part in (group, error.full_key) if part)
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        valid = {str(key) for key in error.parent_node or ()}
        if error.full_key == error.key and not group:  # groups can be chosen, though not all are keys
            valid |= {"sweep", *(folder.name for folder in config_dir().iterdir() if folder.is_dir())}
        return UserError(
            f"{where} is not a setting: {nearest(str(error.key), valid - {'_target_', 'hydra'})}."
        )
    what = str(error).splitlines()[0].rstrip(".")
    if switch := re.fullmatch(r"Value '(.*)' is not a valid bool.*", what):
        return UserError(f"{where}={switch[1]} is not true or false.")
    if unconverted := re.fullmatch(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", what):
        value, wanted = unconverted.groups()
        kinds = {"Integer": "a whole number", "Float": "a number"}
        return UserError(f"{where}={value} is not {kinds.get(wanted, wanted)}.")
    return UserError(f"{where}: {what}." if where else f"{what}.")
