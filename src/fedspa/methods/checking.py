"""Checks of a method: of its class before a run, and of its return values in a run.

They check types, shapes, dtypes and devices alone, which costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedspa.core.client import ClientUpdate, Mixture
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError, difference
from fedspa.core.records import KINDS
from fedspa.core.server import ServerState
from fedspa.methods.base import Method

TESTED = KINDS[:-1]
"""The kinds of model that `Method.kinds` may name."""


def check_declaration(method: Method) -> None:
    """Raise `UserError` if the method's class lacks a required declaration."""
    kinds = method.kinds
    if not isinstance(kinds, tuple | list) or not kinds or not set(kinds) <= set(TESTED):
        raise UserError(
            f"{title(method)} has kinds={kinds!r}: it must be a tuple of some of {', '.join(TESTED)}."
        )
    if "personal" in kinds and type(method).personal is Method.personal:
        raise UserError(
            f'{title(method)} has "personal" among its kinds, but no personal(), which gives that model.'
        )


def check_update(method: Method, update: Any, weights: torch.Tensor, prepares: bool = False) -> ClientUpdate:
    """The checked update of a client.

    `prepares`: True for the update before round 1, which sends no weights. Raises `UserError` unless the update is as
    `ClientUpdate` says, with vectors like `weights` [total].
    """
    who, call = title(method), "client_prepare" if prepares else "client_update"
    if not isinstance(update, ClientUpdate):
        raise wrong(who, f"{call}() returns {_kind(update)} instead of a ClientUpdate")
    if prepares and (update.update is not None or update.state is not None):
        raise wrong(
            who, "client_prepare() sends weights or changes the state: only ClientUpdate.tensors may be set"
        )
    for name in ("update", "mask", "local"):
        vector = getattr(update, name)
        if vector is not None:
            check_vector(who, f"ClientUpdate.{name}", vector, weights)
    if update.local is None and "local" in method.kinds and not prepares:
        raise wrong(
            who, 'ClientUpdate.local is None, though its kinds have "local": it must be those weights'
        )
    if not isinstance(update.tensors, Mapping) or not all(
        isinstance(tensor, torch.Tensor) for tensor in update.tensors.values()
    ):
        raise wrong(who, "ClientUpdate.tensors is no mapping of names to tensors")
    if update.state is not None:
        check_state(method, update.state, weights)
    return update


def check_state(method: Method, state: Any, weights: torch.Tensor) -> ClientState:
    """The checked state of a client. Raises `UserError` if it is not a `ClientState` of the right length."""
    if not isinstance(state, ClientState):
        raise wrong(title(method), f"a client's state is {_kind(state)} instead of a ClientState")
    if state.mask is not None and state.mask.length != len(weights):
        raise wrong(
            title(method),
            f"the mask of a client's state has {state.mask.length} coordinates instead of {len(weights)}",
        )
    return state


def check_server(method: Method, server: Any, before: ServerState) -> ServerState:
    """The checked next state of the server. Raises `UserError` if names, shapes or dtypes have changed."""
    who = title(method)
    if not isinstance(server, ServerState):
        raise wrong(who, f"server_update() returns {_kind(server)} instead of a ServerState")
    check_vector(who, "ServerState.weights", server.weights, before.weights)
    for part in ("tensors", "kept"):
        now, then = getattr(server, part), getattr(before, part)
        if set(now) != set(then):
            raise wrong(who, f"ServerState.{part} holds {sorted(now)} instead of {sorted(then)}")
        for name, tensor in then.items():
            check_vector(who, f"ServerState.{part}[{name!r}]", now[name], tensor)
    return server


def checked_personal(method: Method, model: Any, weights: torch.Tensor) -> torch.Tensor | Mixture:
    """The checked personal model [total] of a method. Raises `UserError` if it is not like the global weights."""
    for vector in (model.personal, model.shared) if isinstance(model, Mixture) else (model,):
        check_vector(title(method), "personal()", vector, weights)
    return model


def check_vector(who: str, what: str, vector: Any, like: torch.Tensor) -> None:
    """Raise `UserError` unless a vector has the shape, dtype and device of `like`. `who` names its source."""
    if not isinstance(vector, torch.Tensor):
        raise wrong(who, f"{what} is {_kind(vector)} instead of a tensor")
    if differs := difference(vector, like):
        raise wrong(who, f"{what} has {differs}")


def title(method: Method) -> str:
    """The method's name in messages."""
    kind = type(method)
    return f"method={method.name} ({kind.__module__}.{kind.__qualname__})"


def wrong(who: str, what: str) -> UserError:
    return UserError(f"{who} gave something wrong: {what}.")


def _kind(thing: Any) -> str:
    if isinstance(thing, torch.Tensor):
        return f"a tensor of shape {list(thing.shape)} and dtype {str(thing.dtype).removeprefix('torch.')}"
    return "None" if thing is None else f"{type(thing).__name__}"
