"""From the config that Hydra composed to a checked `Plan`: typed values, built components, one hash.

Nothing in here needs torch, so a mistake in the config is answered within a second. The network is the
exception: `fedspa.config.network` makes it, when the run has begun.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from omegaconf import AnyNode, BooleanNode, DictConfig, OmegaConf
from omegaconf.errors import (
    OmegaConfBaseException,
)

from fedspa.config.unused import leave_out
from fedspa.core.components import build, component, find_class
from fedspa.core.errors import UserError, brief, check_choice
from fedspa.core.explaining import explain, left_out
from fedspa.core.file_names import file_name
from fedspa.core.identity import config_hash
from fedspa.core.paths import config_dir, project_root
from fedspa.core.plugin_packages import register_plugins
from fedspa.core.records import ACCURACY
from fedspa.core.settings import Config
from fedspa.layer_sparsity.flow import counts_with_flow
from fedspa.server_optimizers.sgd import ServerSGD

if TYPE_CHECKING:
    from fedspa.core.weights import ParameterSpace
    from fedspa.data.source import ImageSource
    from fedspa.layer_sparsity.base import LayerSparsity
    from fedspa.metrics.base import Metric
    from fedspa.server_optimizers.base import ServerOptimizer
    from fedspa.training.choice import EngineChoice
    from fedspa.training.hardware import Hardware

ONE_EACH = (
    "dataset",
    "partition",
    "layer_sparsity",
    "mask",
    "server_optimizer",
    "method",
    "hardware",
    "engine",
)
"""Groups that give one component."""
SEVERAL = ("metrics", "loggers")
"""Parts of the config that hold any number of components, by name."""
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
    server_optimizer: ServerOptimizer
    method: Any
    metrics: dict[str, Metric]
    loggers: dict[str, Any]
    hardware: Hardware
    engine: EngineChoice
    resolved: dict[str, Any]
    """The whole config as plain values, interpolations resolved."""
    unused: tuple[str, ...] = ()
    """What was asked for and is not done, a sentence each."""

    def active_counts(self, space: ParameterSpace) -> list[int] | None:
        """Active coordinates of each tensor under a client's mask; None for a method without a mask searcher.

        Running statistics are never pruned, and count for no budget. Raises `UserError` where nothing could flow
        through the network.
        """
        if not self.method.uses_mask:
            return None
        pruned, fixed = space.parameters, self.mask.keeps_counts
        active = counts_with_flow(
            self.layer_sparsity, pruned.names, pruned.shapes, self.settings.sparsity, by_tensor=fixed
        )
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


def register(settings: type[Config] = Config) -> None:
    """Make the schema and the resolvers that conf/ uses known to Hydra and OmegaConf."""
    schema = OmegaConf.structured(settings)
    groups = [schema[group] for group in ("model", *ONE_EACH, *SEVERAL)]
    for open_ended in (*groups, schema.training.optimizer_options):
        # Hydra would refuse options that no YAML mentions; `check`, and the optimizer, know all that there are.
        OmegaConf.set_struct(open_ended, False)
    _leave_switches_to_check(schema)
    register_plugins(config_dir())
    ConfigStore.instance().store(name="schema", node=schema)
    OmegaConf.register_new_resolver("project_root", lambda: str(project_root()), replace=True)
    OmegaConf.register_new_resolver("times", lambda one, other: one * other, replace=True)
    OmegaConf.register_new_resolver("last_part", lambda path: Path(str(path or "folder")).name, replace=True)
    OmegaConf.register_new_resolver(
        "file_name", lambda name: file_name([str(name).replace("/", "--")]), replace=True
    )
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
    except (UserError, TypeError):  # `check` will tell of it
        return _root_.sparsity
    return _root_.sparsity if method.uses_sparsity else 0.0


def check(config: DictConfig) -> Plan:
    """Type, build and check everything but the network. Raises `UserError` for the first mistake.

    A class named by the config must come from fedspa or from one of `trusted_packages`.
    """
    schema = OmegaConf.get_type(config)  # that of the command; dict for the config that a run recorded
    values: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    _check_named(values)
    for field in () if schema in (None, dict) else fields(schema):
        if field.name not in values:
            raise left_out(field.name)
    try:
        values = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise explain(error) from error
    settings, resolved = build("", Config if schema in (None, dict) else schema, values)
    trusted = settings.trusted_packages
    parts: dict[str, Any] = {}
    for group in ONE_EACH:
        parts[group], resolved[group] = component(group, values[group], trusted, values)
    for group in SEVERAL:
        built = {
            name: component(f"{group}.{name}", node, trusted, values) for name, node in values[group].items()
        }
        parts[group] = {name: component for name, (component, _) in built.items()}
        resolved[group] = {name: plain for name, (_, plain) in built.items()}
    unused = leave_out(settings, parts, resolved)
    plan = Plan(settings=settings, resolved=resolved, unused=unused, **parts)
    _check_together(plan)
    plan.method.server_optimizer = plan.server_optimizer
    if plan.method.uses_mask:
        plan.method.searcher = plan.mask
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
    from fedspa.methods.checking import check_declaration

    check_declaration(plan.method)
    method, mask = plan.names["method"], plan.names["mask"]
    if plan.method.uses_mask and plan.mask is None:
        raise UserError(f"method={method} needs masks, but mask={mask}: use mask=dst or another searcher.")
    if plan.mask is not None and not plan.method.uses_mask:
        raise UserError(f"method={method} trains dense, so mask={mask} has no meaning: use mask=none.")
    if not plan.method.sends and plan.server_optimizer != ServerSGD(name="sgd"):
        raise UserError(
            f"server_optimizer={plan.names['server_optimizer']} has no effect on method={method}, which has no "
            "server's model: use server_optimizer=sgd."
        )
    if not plan.method.sends and plan.settings.personal_layers != "none":
        raise UserError(
            f"personal_layers has no effect on method={method}, whose clients keep all layers: "
            "use personal_layers=none."
        )
    plan.method.check_training(plan.settings.training)
    _check_learning_rates(plan)
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
    plan.settings.eval.check_rounds(plan.settings.federation.rounds)
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


def _check_learning_rates(plan: Plan) -> None:
    """Raise `UserError` where the learning rate becomes 0, after which nothing is trained."""
    training, rounds = plan.settings.training, plan.settings.federation.rounds
    double = plan.hardware.precision == "64-true"
    smallest = math.ulp(0.0) if double else 2.0**-149  # the least number above 0; half of it is rounded to 0

    def vanishes(round: int) -> bool:
        return training.lr_at(round) <= smallest / 2

    if not vanishes(rounds - 1):
        return
    first = bisect_left(range(rounds), True, key=vanishes)  # a learning rate only ever falls
    remedy = (
        f"raise training.lr_decay, or use federation.rounds={first} at most" if first else "raise training.lr"
    )
    raise UserError(
        f"training.lr={training.lr} with training.lr_decay={training.lr_decay} is 0 in "
        f"{'float64' if double else 'float32'} from round {first + 1} of federation.rounds={rounds} on, and nothing "
        f"would be trained: {remedy}."
    )


def _check_model(model: dict[str, Any]) -> None:
    """What can be said of the network before torch is loaded."""
    if model.get("batchnorm") is not None:
        check_choice("model.batchnorm", model["batchnorm"], ("average", "groupnorm"))
