"""Checks a mask that a searcher found. A wrong mask would give wrong numbers without an error."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedspa.core.client import Client
from fedspa.core.errors import UserError, difference
from fedspa.masks.search_input import SearchInput


def check_mask(
    client: Client,
    title: str,
    search: SearchInput,
    mask: torch.Tensor,
    planned: Sequence[int] | int | None,
    *,
    may_change: bool,
) -> None:
    """Raise `UserError` unless a mask has the form of `search.mask`. It takes two passes over the mask.

    Args:
        client: the client of the mask. Values are checked when they are known.
        title: the searcher's name in the message.
        planned: active parameters of each tensor, or in all; None or empty: any number.
        may_change: True if the mask may differ from `search.mask`.
    """
    like = search.mask
    if not isinstance(mask, torch.Tensor):
        raise refusal(title, search, f"{type(mask).__name__} instead of a mask, which must be a tensor")
    if differs := difference(mask, like):
        raise refusal(title, search, f"a mask that has {differs}, as search.mask has")
    space, same = search.space, torch.ones((), dtype=torch.bool) if may_change else (mask == like).all()

    def check(found: torch.Tensor, ones: torch.Tensor, same: torch.Tensor) -> None:
        counts = found.tolist()
        if counts != ones.tolist():
            raise refusal(title, search, "a mask with other values than zeros and ones")
        if isinstance(planned, int):
            compared = [("all tensors", sum(counts), planned)]
        else:
            compared = list(zip(space.names, counts, planned or counts, strict=True))
        for name, count, wanted in compared:
            if count != wanted:
                raise refusal(
                    title,
                    search,
                    f"a mask with {count:,} active parameters in {name}, where its plan has {wanted:,}: keep to the "
                    "plan, or say another one by counts()",
                )
        if not same:
            raise refusal(
                title,
                search,
                "another mask than before, but says by searching() that it does not search",
            )

    client.later([space.counts(mask), space.counts(mask == 1), same], check)


def refusal(title: str, search: SearchInput, what: str) -> UserError:
    """The error for a searcher that returned something wrong."""
    return UserError(f"{title} gave in round {search.round + 1} {what}.")
