"""Checks of a config that need no `Plan`: components that are missing, and values that contradict each other."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedspa.core.errors import UserError, check_choice
from fedspa.core.explaining import without_name, without_value
from fedspa.core.settings import TrainingSettings

if TYPE_CHECKING:
    from fedspa.methods.base import Method

PYTHON_CLASS = "python_class"
"""Replaces `_target_` in the node of a component that was a Python object. No config can make such an object again."""


def check_values(values: Mapping[str, Any] | Sequence[Any], where: str = "") -> None:
    """Raise `UserError` for ??? and for a whole number that needs more than 64 bits."""
    for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        name = f"{where}.{key}" if where else str(key)
        if isinstance(value, Mapping | list):
            check_values(value, name)
        elif value == "???":
            raise without_value(name)
        elif isinstance(value, int) and value.bit_length() > 63:
            raise UserError(f"{name}={value} is out of range: a whole number has at most 64 bits.")


def check_objects(values: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """Raise `UserError` if a recorded component was a Python object that is missing in `objects`."""
    for group, node in values.items():
        if isinstance(node, Mapping) and PYTHON_CLASS in node and group not in objects:
            raise UserError(
                f"{group} of this run was a Python object of class {node[PYTHON_CLASS]}, which no config can make "
                "again: use fedspa.Federation(..., resume=<the run's folder>) with the same objects."
            )


def check_named(values: Mapping[str, Any], groups: Sequence[str]) -> None:
    """Raise `UserError` if the component of a group lacks its name."""
    for group in groups:
        node = values[group]
        if not isinstance(node, dict) or node.get("name") is None:
            raise without_name(group)


def moves_by_itself(method: Method) -> str:
    """The reason why no server optimizer is used; "" if one is used."""
    if not (method.sends and method.sends_weights):
        return "which has no server's model"
    return "whose server moves its weights by the method's own rule" if method.moves_weights else ""


def check_personal_layers(method: Method, name: str, layers: Any) -> None:
    """Raise `UserError` if the method cannot use personal layers, or needs them."""
    if layers == "none":
        if method.needs_personal_layers:
            raise UserError(
                f"personal_layers=none leaves out the personal layers that method={name} needs: use "
                "personal_layers=head."
            )
    elif not method.sends:
        raise UserError(
            f"personal_layers has no effect on method={name}, whose clients keep all layers: use personal_layers=none."
        )
    elif method.training_class:
        raise UserError(
            f"personal_layers does not go with method={name}, whose training step needs whole models: use "
            "personal_layers=none."
        )


def check_learning_rates(training: TrainingSettings, rounds: int, precision: str) -> None:
    """Raise `UserError` if the learning rate becomes 0, after which nothing is trained."""
    double = precision == "64-true"
    smallest = math.ulp(0.0) if double else 2.0**-149  # the least positive number; half of it is rounded to 0

    def vanishes(round: int) -> bool:
        return training.lr_at(round) <= smallest / 2

    if not vanishes(rounds - 1):
        return
    first = bisect_left(range(rounds), True, key=vanishes)  # the learning rate never rises
    remedy = (
        f"raise training.lr_decay, or use federation.rounds={first} at most" if first else "raise training.lr"
    )
    raise UserError(
        f"training.lr={training.lr} with training.lr_decay={training.lr_decay} is 0 in "
        f"{'float64' if double else 'float32'} from round {first + 1} of federation.rounds={rounds} on, and nothing "
        f"would be trained: {remedy}."
    )


def check_model(model: dict[str, Any]) -> None:
    """Check the network's settings that need no torch."""
    if model.get("batchnorm") is not None:
        check_choice("model.batchnorm", model["batchnorm"], ("average", "groupnorm"))
