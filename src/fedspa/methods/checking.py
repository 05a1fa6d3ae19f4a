"""Checking a method: what its class declares, before a run, and what it asks and answers in one.

Shapes, dtypes and devices alone are looked at, which costs nothing; that values are finite is seen where an update
is taken (`Visitor`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch

from fedspa.client_state import ClientState
from fedspa.errors import UserError
from fedspa.methods.base import ClientTask, Method, Visit
from fedspa.records import KINDS, Costs
from fedspa.rounds.lockstep import Dialogue, relayed
from fedspa.rounds.requests import Gradient, NextMask, Predict, Request, Train, TrainingAccuracy

TESTED = KINDS[:-1]
"""What `Method.kinds` may name."""
REQUESTS = (Train, Gradient, NextMask, TrainingAccuracy, Predict)


def check_declaration(method: Method) -> None:
    """Raise `UserError` where the method's class lacks what every run needs of it."""
    kinds = getattr(method, "kinds", None)
    if kinds is None:
        raise UserError(
            f"{_who(method)} has no kinds: it must name the models that a client has, of {', '.join(TESTED)}."
        )
    if not isinstance(kinds, tuple | list) or not kinds or not set(kinds) <= set(TESTED):
        raise UserError(
            f"{_who(method)} has kinds={kinds!r}: it must be a tuple of some of {', '.join(TESTED)}."
        )
    if "personal" in kinds and type(method).personal is Method.personal:
        raise UserError(
            f'{_who(method)} has "personal" among its kinds, but no personal(), which gives that model.'
        )


def checked_visit(method: Method, task: ClientTask) -> Dialogue[Visit]:
    """The method's visit. Raises `UserError` that names the method where it asks or leaves anything wrong."""
    dialogue = method.visit(task)
    if not isinstance(dialogue, Generator):
        raise _refusal(method, f"visit() gives {_kind(dialogue)} instead of yielding requests")

    def ask(request: Request) -> Request:
        check_request(method, task, request)
        return request

    visit = yield from relayed(dialogue, ask, lambda request, answer: answer)
    check_answer(method, task, visit)
    return visit


def check_request(method: Method, task: ClientTask, request: Any) -> None:
    """Raise `UserError` unless a method asks for something that there is, of vectors [total]."""
    if not isinstance(request, REQUESTS):
        names = ", ".join(kind.__name__ for kind in REQUESTS)
        raise _refusal(method, f"visit() asks for {_kind(request)}, which is none of {names}")
    if isinstance(request, NextMask):
        return
    _check_vector(method, f"{type(request).__name__}.weights", request.weights, task.weights)
    if isinstance(request, Train):
        if request.mask is not None:
            _check_vector(method, "Train.mask", request.mask, task.weights)
        if request.pull is not None:
            _check_vector(method, "Train.pull.anchor", request.pull.anchor, task.weights)


def check_answer(method: Method, task: ClientTask, visit: Any) -> None:
    """Raise `UserError` unless a visit leaves what `Visit` says."""
    if not isinstance(visit, Visit):
        raise _refusal(method, f"visit() returns {_kind(visit)} instead of a Visit")
    for name in ("update", "holds", "local"):
        vector = getattr(visit, name)
        if vector is not None:
            _check_vector(method, f"Visit.{name}", vector, task.weights)
    if visit.local is None and "local" in method.kinds:
        raise _refusal(method, 'Visit.local is None, though its kinds have "local": it must be those weights')
    loss = visit.loss
    if not (isinstance(loss, torch.Tensor) and loss.shape == () and loss.dtype == torch.float64):
        raise _refusal(method, f"Visit.loss is {_kind(loss)}: it must be a float64 scalar tensor")
    if not isinstance(visit.samples, int) or isinstance(visit.samples, bool) or visit.samples < 0:
        raise _refusal(method, f"Visit.samples is {visit.samples!r}: it must be a whole number of at least 0")
    if not isinstance(visit.costs, Costs):
        raise _refusal(method, f"Visit.costs is {_kind(visit.costs)} instead of Costs")
    check_state(method, visit.state)
    mask = visit.state.mask
    if mask is not None and mask.length != len(task.weights):
        raise _refusal(
            method, f"the mask of Visit.state has {mask.length} coordinates instead of {len(task.weights)}"
        )


def check_state(method: Method, state: Any) -> ClientState:
    """The state that a method gives. Raises `UserError` if it is none."""
    if not isinstance(state, ClientState):
        raise _refusal(method, f"a client's state is {_kind(state)} instead of a ClientState")
    return state


def checked_personal(method: Method, model: Any, weights: torch.Tensor) -> torch.Tensor:
    """The personal model [total] that a method gives. Raises `UserError` if it is not like the global weights."""
    _check_vector(method, "personal()", model, weights)
    return model


def _check_vector(method: Method, what: str, vector: Any, like: torch.Tensor) -> None:
    if not isinstance(vector, torch.Tensor):
        raise _refusal(method, f"{what} is {_kind(vector)} instead of a tensor")
    facts: list[tuple[str, Callable[[torch.Tensor], Any]]] = [
        ("shape", lambda tensor: list(tensor.shape)),
        ("dtype", lambda tensor: tensor.dtype),
        ("device", lambda tensor: tensor.device),
    ]
    for name, of in facts:
        if of(vector) != of(like):
            has, must = (str(of(tensor)).removeprefix("torch.") for tensor in (vector, like))
            raise _refusal(method, f"{what} has {name} {has}: as the global weights, it must have {must}")


def _kind(thing: Any) -> str:
    if isinstance(thing, torch.Tensor):
        return f"a tensor of shape {list(thing.shape)} and dtype {str(thing.dtype).removeprefix('torch.')}"
    return "None" if thing is None else f"{type(thing).__name__}"


def _who(method: Method) -> str:
    kind = type(method)
    return f"method={method.name} ({kind.__module__}.{kind.__qualname__})"


def _refusal(method: Method, what: str) -> UserError:
    return UserError(f"{_who(method)} gave something wrong: {what}.")
