"""The network that a plan describes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from omegaconf import MISSING
from torch import nn

from fedspa.core.components import build, check_kind, find_object
from fedspa.core.errors import UserError
from fedspa.models.batchnorm import with_batchnorm
from fedspa.models.image_size import check_forward
from fedspa.models.personal_layers import set_personal_layers

if TYPE_CHECKING:
    from fedspa.config.plan import Plan


def build_model(plan: Plan, channels: int, image_size: int, classes: int) -> nn.Module:
    """The network for images [channels, image_size, image_size].

    Raises `UserError` for an option that its constructor does not have, or of another type.
    """
    make, arguments = model_call(plan, channels, image_size, classes)
    batchnorm = plan.resolved["model"].get("batchnorm")
    network = with_batchnorm(make(**arguments), batchnorm)
    set_personal_layers(network, plan.settings.personal_layers, batchnorm)
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
        check_kind("model", make)
    elif make.__module__.startswith("fedspa.") and not make.__module__.startswith("fedspa.models."):
        raise UserError(
            f"model._target_={make.__module__}.{make.__qualname__} makes no network: of fedspa's own functions only "
            "those of fedspa.models do."
        )
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
    _, typed = build("model", schema, options)
    return make, {**{name: value for name, value in given.items() if name in {*data, *signature}}, **typed}
