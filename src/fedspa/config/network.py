"""Builds the network of a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from omegaconf import MISSING
from torch import nn

from fedspa.core.components import build, check_kind, find_object
from fedspa.core.errors import UserError
from fedspa.models.arguments import data_arguments, needed_fact
from fedspa.models.batchnorm import with_batchnorm
from fedspa.models.channels import set_channels
from fedspa.models.checking import check_forward
from fedspa.models.personal_layers import set_personal_layers

if TYPE_CHECKING:
    from fedspa.config.plan import Plan


def build_model(plan: Plan) -> nn.Module:
    """The network for the plan's data set.

    Raises `UserError` for an option that its constructor does not have, or that has the wrong type.
    """
    make, arguments = (plan.make_model, {}) if plan.make_model else model_call(plan)
    batchnorm = plan.resolved["model"].get("batchnorm")
    network = with_batchnorm(make(**arguments), batchnorm)
    set_personal_layers(network, plan.settings.personal_layers, batchnorm)
    check_forward(plan.names["model"], network, plan.dataset)
    if plan.mask is not None and plan.mask.cuts_channels:
        set_channels(network, plan.dataset.blank(2, next(network.parameters()).dtype))
    return network


def model_call(plan: Plan) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    """The maker of the network for the plan's data set, and its arguments as plain values.

    Raises `UserError` for an option that the maker does not have or that has the wrong type, and for unsuitable data.
    """
    options = {key: value for key, value in plan.resolved["model"].items() if key != "_target_"}
    make = find_object(
        "model._target_", plan.resolved["model"].get("_target_"), plan.settings.trusted_packages
    )
    if isinstance(make, type):
        check_kind("model", make)
    elif make.__module__.startswith("fedspa.") and not make.__module__.startswith("fedspa.models."):
        raise UserError(
            f"model._target_={make.__module__}.{make.__qualname__} makes no network: of fedspa's own functions only "
            "those of fedspa.models do."
        )
    signature, facts = inspect.signature(make).parameters, plan.dataset.model_facts
    if missing := needed_fact(facts, signature):
        raise UserError(
            f"model={plan.names['model']} needs {missing}, which dataset={plan.names['dataset']} does not have: "
            f"it takes no {plan.dataset.shape_text}; use model=mlp or gru, or one of your own."
        )
    beside = {"facts": facts, "trusted_packages": plan.settings.trusted_packages}
    given = data_arguments(facts, signature) | {name: beside[name] for name in beside if name in signature}
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
    _, typed = build("model", schema, options)
    return make, {**given, **typed}
