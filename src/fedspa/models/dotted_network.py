"""A network of another package, by its dotted path."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from fedspa.core.components import find_object
from fedspa.core.errors import UserError, brief
from fedspa.models.arguments import data_arguments


def dotted_network(
    facts: dict[str, Any],
    trusted_packages: list[str],
    path: str | None = None,
    arguments: dict[str, Any] | None = None,
) -> nn.Module:
    """The network that the class or function at `path` makes from `arguments` and the data set's facts.

    `facts`: as `Source.model_facts`; they are passed by the names of its parameters (`fedspa.models.arguments`).

    Raises `UserError` if the path is not a trusted object, if the call fails, or if the result is no `nn.Module`.
    """
    if path is None:
        raise UserError(
            "model.path is missing: model=dotted needs the path of a network, such as mypackage.nets.Net."
        )
    make = find_object("model.path", path, trusted_packages)
    is_network = isinstance(make, type) and issubclass(make, nn.Module)
    if make.__module__.partition(".")[0] == "fedspa" and not is_network:  # such an object must not be called
        raise UserError(f"model.path={path} is no network: of fedspa itself it must be a torch.nn.Module.")
    given = data_arguments(facts, inspect.signature(make).parameters) | (arguments or {})
    try:
        network = make(**given)
    except Exception as error:  # any error of foreign code
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        raise UserError(
            f"model.path={path} cannot be made of ({shown}): {brief(error)}; model.arguments has what is missing."
        ) from error
    if not isinstance(network, nn.Module):
        raise UserError(f"model.path={path} makes a {type(network).__name__}, not a torch.nn.Module.")
    return network
