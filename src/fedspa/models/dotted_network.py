"""A network of somebody else's, by its dotted path."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from fedspa.core.components import find_object
from fedspa.core.errors import UserError, brief

NAMES = {
    "channels": ("channels", "in_channels", "in_chans", "input_channels", "num_channels"),
    "image_size": ("image_size", "img_size", "input_size", "size"),
    "classes": ("classes", "num_classes", "n_classes", "out_features"),
}
"""What parameters are called that take what the data set says."""


def dotted_network(
    channels: int,
    image_size: int,
    classes: int,
    trusted_packages: list[str],
    path: str | None = None,
    arguments: dict[str, Any] | None = None,
) -> nn.Module:
    """What the class or function at `path` makes of `arguments` and of what the data set says, by parameters' names.

    Raises `UserError` for what is no trusted object, cannot be called so, or makes no `nn.Module`.
    """
    if path is None:
        raise UserError(
            "model.path is missing: model=dotted needs the path of a network, such as mypackage.nets.Net."
        )
    make = find_object("model.path", path, trusted_packages)
    is_network = isinstance(make, type) and issubclass(make, nn.Module)
    if make.__module__.partition(".")[0] == "fedspa" and not is_network:  # which is not even to be called
        raise UserError(f"model.path={path} is no network: of fedspa itself it must be a torch.nn.Module.")
    taken = inspect.signature(make).parameters
    told = {"channels": channels, "image_size": image_size, "classes": classes}
    given = {name: told[what] for what, names in NAMES.items() for name in names if name in taken}
    given |= arguments or {}
    try:
        network = make(**given)
    except Exception as error:  # whatever foreign code makes of what it is given
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        raise UserError(
            f"model.path={path} cannot be made of ({shown}): {brief(error)}; model.arguments has what is missing."
        ) from error
    if not isinstance(network, nn.Module):
        raise UserError(f"model.path={path} makes a {type(network).__name__}, not a torch.nn.Module.")
    return network
