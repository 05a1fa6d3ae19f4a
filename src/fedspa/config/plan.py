"""Turns the config that Hydra composed into a checked `Plan`: typed values, built components, one hash.

Nothing here imports torch, so a mistake in the config is reported within a second. The network is the
exception: `fedspa.config.network` builds it when the run has begun.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedspa.config.checking import (
    check_learning_rates,
    check_model,
    check_named,
    check_objects,
    check_personal_layers,
    check_values,
    moves_by_itself,
)
from fedspa.config.schema import ONE_EACH, SEVERAL
from fedspa.config.unused import leave_out
from fedspa.core.components import build, component
from fedspa.core.errors import UserError, check_range
from fedspa.core.explaining import explain, left_out
from fedspa.core.identity import config_hash
from fedspa.core.records import ACCURACY
from fedspa.core.settings import Config
from fedspa.layer_sparsity.flow import check_total, counts_with_flow
from fedspa.server_optimizers.sgd import ServerSGD

if TYPE_CHECKING:
    from torch import nn

    from fedspa.core.weights import ParameterSpace
    from fedspa.data.source import Source
    from fedspa.layer_sparsity.base import LayerSparsity
    from fedspa.metrics.base import Metric
    from fedspa.server_optimizers.base import ServerOptimizer
    from fedspa.training.choice import EngineChoice
    from fedspa.training.hardware import Hardware

OF_NUMBERS = {
    "mse": "fedspa.metrics.mse.MeanSquaredError",
    "mae": "fedspa.metrics.mae.MeanAbsoluteError",
}
"""The default metrics of a regression."""
ONE_OF_MANY = {
    "fedspa.models.timm_network.timm_network": ("timm", "name"),
    "fedspa.models.dotted_network.dotted_network": ("dotted", "path"),
}
"""Options of the group `model` that stand for many networks, and the setting that names the network."""


@dataclass(frozen=True)
class Plan:
    """A run that is ready to begin: every setting is typed and checked, every component is built."""

    settings: Config
    """The typed settings. `settings.sparsity` is 0 for a method that trains dense."""
    dataset: Source
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
    """The whole config as plain values, with interpolations resolved."""
    unused: tuple[str, ...] = ()
    """Sentences about settings that are not used."""
    make_model: Callable[[], nn.Module] | None = None
    """Makes the user's own network; None: the config names the network."""

    def active_counts(self, space: ParameterSpace) -> list[int] | None:
        """The active coordinates of each tensor under a client's mask; None for a method without a mask searcher.

        They are the counts of the layer sparsity. `fit` passes them to the mask searcher, whose `counts` may differ.
        Running statistics are never pruned, and are not part of the budget.

        Raises `UserError` if nothing could flow through the network.
        """
        if not self.method.uses_mask:
            if self.method.uses_sparsity:
                check_total(space.parameters.shapes, self.settings.sparsity)
            return None
        pruned, settings = space.parameters, self.settings
        target = counts_with_flow(
            self.layer_sparsity,
            pruned.names,
            pruned.shapes,
            settings.sparsity,
            by_tensor=self.mask.keeps_tensors,
        )
        self.mask.fit(pruned, target, settings.federation.rounds)
        return [*self.mask.target, *space.running.sizes]

    @property
    def names(self) -> dict[str, str]:
        """The option chosen in each group. For a network of another package its name is added: timm:resnet18."""
        names = {group: self.resolved[group]["name"] for group in ("model", *ONE_EACH)}
        model = self.resolved["model"]
        option, setting = ONE_OF_MANY.get(model.get("_target_"), (None, ""))
        return names | {"model": f"{option}:{model.get(setting)}"} if option else names

    @property
    def main_metric(self) -> str:
        """The metric of summaries, targets and the best checkpoint: accuracy, else the first metric."""
        return ACCURACY if ACCURACY in self.metrics else next(iter(self.metrics))

    @property
    def config_hash(self) -> str:
        """A hash that is equal for runs that must give equal results."""
        return config_hash(self.resolved)


def check(config: DictConfig, objects: Mapping[str, Any] | None = None) -> Plan:
    """Type, build and check everything except the network. Raises `UserError` for the first mistake.

    A class named by the config must come from fedspa or from one of `trusted_packages`.

    `objects`: components by group that are used as they are, and as `model` a function that makes the network. The
    config's node of such a group only describes the object.
    """
    objects = objects or {}
    schema = OmegaConf.get_type(config)  # the command's schema; dict for a recorded config
    values: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    check_objects(values, objects)
    schema = Config if schema in (None, dict) else schema
    for field in fields(schema):
        if field.name not in values:
            raise left_out(field.name)
    check_named(values, ("model", *ONE_EACH))
    try:
        values = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise explain(error) from error
    check_values(values)
    settings, resolved = build("", schema, values)
    trusted = settings.trusted_packages
    parts: dict[str, Any] = {}
    for group in ONE_EACH:
        if group in objects:
            parts[group], resolved[group] = objects[group], values[group]
        else:
            parts[group], resolved[group] = component(group, values[group], trusted, values)
    for group in SEVERAL:
        built = {
            name: component(f"{group}.{name}", node, trusted, values) for name, node in values[group].items()
        }
        parts[group] = {name: component for name, (component, _) in built.items()}
        resolved[group] = {name: plain for name, (_, plain) in built.items()}
    from fedspa.methods.checking import check_declaration  # imports torch, which typos need not wait for

    check_declaration(parts["method"])
    unused = leave_out(settings, parts, resolved)
    plan = Plan(settings=settings, resolved=resolved, unused=unused, make_model=objects.get("model"), **parts)
    _check_together(plan)
    plan.method.server_optimizer = plan.server_optimizer
    if plan.method.uses_mask:
        plan.method.searcher = plan.mask
    return _described(plan)


def _described(plan: Plan) -> Plan:
    """The plan with the facts of its data. This comes last, because it may start a download."""
    partition = plan.partition.described()
    dataset = plan.dataset.described(getattr(partition, "column", None))
    for group, part in (("partition", partition), ("dataset", dataset)):
        if part is not getattr(plan, group):
            plan.resolved[group] = {"_target_": plan.resolved[group]["_target_"], **asdict(part)}
    metrics = plan.metrics
    if dataset.is_regression and list(metrics) == [ACCURACY]:  # the default, which is impossible here
        parts = {name: {"_target_": target, "name": name} for name, target in OF_NUMBERS.items()}
        built = {name: component(f"metrics.{name}", node, []) for name, node in parts.items()}
        metrics = {name: metric for name, (metric, _) in built.items()}
        plan.resolved["metrics"] = {name: plain for name, (_, plain) in built.items()}
        remark = f"The targets are numbers, so the scores are {' and '.join(metrics)} instead of {ACCURACY}"
        plan = replace(plan, unused=(*plan.unused, remark))
    plan = replace(plan, partition=partition, dataset=dataset, metrics=metrics)
    _check_metrics(plan)
    return plan


def _check_metrics(plan: Plan) -> None:
    """Raise `UserError` for metrics, targets and a method that do not fit the data."""
    numbers = plan.dataset.is_regression
    for name, metric in plan.metrics.items():
        if metric.of_numbers != numbers:
            kinds, fitting = ("classes", "numbers"), "mse,mae" if numbers else ACCURACY
            raise UserError(
                f"metric={name} compares {kinds[metric.of_numbers]}, but the targets of "
                f"dataset={plan.names['dataset']} are {kinds[numbers]}: use metric=[{fitting}]."
            )
    if numbers and plan.method.needs_accuracy:
        raise UserError(
            f"method={plan.names['method']} decides by the accuracy on a client's rows, but the targets of this data "
            "set are numbers, which have none: use another method, such as fedspa."
        )
    if not numbers and ACCURACY not in plan.metrics:
        names = ",".join([ACCURACY, *plan.metrics])
        raise UserError(f"metric has no {ACCURACY}, which the summary is about: use metric=[{names}].")
    if not plan.metrics:
        raise UserError("metric is empty: use metric=[mse,mae].")
    for target in plan.settings.eval.targets:
        check_range("eval.targets", target, low=0, high=None if numbers else 100)


def _check_together(plan: Plan) -> None:
    """Check settings that concern several components."""
    method, mask = plan.names["method"], plan.names["mask"]
    if plan.method.uses_mask and plan.mask is None:
        raise UserError(f"method={method} needs masks, but mask={mask}: use mask=dst or another searcher.")
    if plan.method.uses_mask:
        plan.method.check_mask(plan.mask)
    if plan.mask is not None and not plan.method.uses_mask:
        raise UserError(
            f"method={method} trains dense, so mask={mask} has no meaning: use mask=none, or a MaskedMethod such as "
            "method=fedspa."
        )
    if plan.mask is not None:
        plan.mask.check_sparsity(plan.names["layer_sparsity"], plan.settings.sparsity)
    if plan.server_optimizer != ServerSGD(name="sgd") and (why := moves_by_itself(plan.method)):
        raise UserError(
            f"server_optimizer={plan.names['server_optimizer']} has no effect on method={method}, {why}: use "
            "server_optimizer=sgd."
        )
    check_personal_layers(plan.method, method, plan.settings.personal_layers)
    if plan.settings.training.proximal and plan.method.own_proximal:
        raise UserError(
            f"training.proximal={plan.settings.training.proximal} does not go with method={method}, which has a "
            f"proximal term of its own: use {plan.method.own_proximal}."
        )
    if plan.method.needs_public and not plan.dataset.public_fraction:
        raise UserError(
            f"method={method} needs public rows, but dataset.public_fraction=0 leaves none: set it to 0.1, say."
        )
    plan.method.check_training(plan.settings.training)
    plan.method.check_clients(plan.settings.federation.clients)
    check_learning_rates(plan.settings.training, plan.settings.federation.rounds, plan.hardware.precision)
    if plan.settings.theory.every and (
        plan.mask is None
        or plan.method.moves_weights
        or plan.method.shares_mask
        or not {"personal", "local"} <= set(plan.method.kinds)
    ):
        raise UserError(
            f"theory.every={plan.settings.theory.every} needs a personal and a local model of each client, under its "
            f"own mask of the server's weights: method={method} does not have them, so set it to 0."
        )
    if plan.settings.save.local and "local" not in plan.method.kinds:
        raise UserError(f"save.local=true: method={method} has no local models. Set save.local=false.")
    if plan.settings.faults.corruption and plan.settings.federation.wire is None:
        raise UserError(
            f"faults.corruption={plan.settings.faults.corruption} needs messages whose bits can flip: "
            "set federation.wire=fp32 (or fp16, bf16)."
        )
    plan.settings.eval.check_rounds(plan.settings.federation.rounds)
    check_model(plan.resolved["model"])
    path = plan.resolved["dataset"].get("path")
    if path is not None and not os.path.exists(os.path.expanduser(path)):
        raise UserError(f"dataset.path={path} does not exist: it must be the data set's folder or file.")
