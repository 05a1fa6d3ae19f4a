"""The optimizer of local training, by its name in the config."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from fedspa.core.errors import UserError, brief, nearest
from fedspa.core.settings import TrainingSettings


def make_optimizer(
    settings: TrainingSettings, weights: torch.nn.Parameter, lr: float
) -> torch.optim.Optimizer:
    """A fresh optimizer over the flat weights [trained]. SGD is fused: it passes over them once a step.

    Raises `UserError` for an unknown class of torch.optim, and for settings that the class does not accept.
    """
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            [weights], lr=lr, momentum=settings.momentum, weight_decay=settings.weight_decay, fused=True
        )
    make = _class(settings.optimizer)
    taken = inspect.signature(make).parameters
    options: dict[str, Any] = {"lr": lr, "weight_decay": settings.weight_decay}
    if settings.momentum:
        options["momentum"] = settings.momentum
    for name in options:
        if name not in taken:
            raise UserError(
                f"training.{name} has no effect on training.optimizer={settings.optimizer}, which takes no {name}: "
                "set it to 0."
            )
    try:
        return make([weights], **options, **settings.optimizer_options)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"training.optimizer_options do not fit training.optimizer={settings.optimizer} ({brief(error)}): it takes "
            f"{', '.join(name for name in taken if name not in ('params', *options))}."
        ) from error


def _class(name: str) -> Callable[..., torch.optim.Optimizer]:
    if name == "adamw":
        return torch.optim.AdamW
    known = {
        key: kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    wanted = name.removeprefix("torch.optim.")
    if wanted not in known:
        raise UserError(f"training.optimizer={name} is not there: {nearest(wanted, known)}.")
    return known[wanted]
