"""The networks of timm, with a head for the data's classes.

timm requires torchvision, and imports it as a whole: for its data pipeline, and for one class that it compares
layers with. None of its networks computes with it. So if torchvision is not installed, an empty module
replaces it while timm is imported, and timm alone is enough (`pip install --no-deps timm`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import nn

from fedspa.core.errors import UserError, brief, nearest

_PARTS = ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets", ".models", ".utils")


def timm_network(
    channels: int,
    image_size: int | tuple[int, int],
    classes: int,
    name: str,
    pretrained: bool = False,
    arguments: dict[str, Any] | None = None,
) -> nn.Module:
    """The network called `name` in timm.

    `pretrained` loads published weights, which timm downloads from the Hugging Face hub. Without it nothing is
    downloaded.
    `arguments` are passed to `timm.create_model`, such as {drop_path_rate: 0.1}.
    Raises `UserError` if timm is missing, does not know the name, or cannot make the network.
    """
    timm = _timm()
    if not timm.is_model(name):
        raise UserError(f"model.name={name} is no network of timm: {nearest(name, timm.list_models())}.")
    config = timm.models.get_pretrained_cfg(name)
    size = {"img_size": image_size} if config is not None and config.fixed_input_size else {}
    try:
        return timm.create_model(
            name,
            pretrained=pretrained,
            in_chans=channels,
            num_classes=classes,
            **{**size, **(arguments or {})},
        )
    except Exception as error:  # any error of a network's own code
        how = "with published weights " if pretrained else ""
        raise UserError(
            f"model.name={name} cannot be made {how}for images of {channels} channels and size {image_size} "
            f"({brief(error)}): use another network, or set model.arguments."
        ) from error


def _timm() -> Any:
    try:
        with _without_torchvision():
            import timm
    except ImportError as error:
        raise UserError(
            f"model=timm needs timm, which cannot be imported ({brief(error)}): pip install 'fedspa[timm]'."
        ) from error
    return timm


@contextmanager
def _without_torchvision() -> Iterator[None]:
    if "timm" in sys.modules or find_spec("torchvision"):
        yield
        return
    names = [f"torchvision{part}" for part in _PARTS]
    for name in names:
        sys.modules[name] = _Empty(name)
        parent, _, short_name = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], short_name, sys.modules[name])
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


class _Names(type):
    """A class with an attribute of every name, whose value is the name, as in an enumeration."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(ModuleType):
    """A module with an attribute of every name, which is an empty class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})
