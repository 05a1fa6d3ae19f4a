"""The check of a mask that a searcher found: a wrong mask would become wrong numbers without a word."""

from __future__ import annotations

import torch

from fedspa.core.errors import UserError
from fedspa.masks.search_input import SearchInput


def check_mask(
    title: str, search: SearchInput, mask: torch.Tensor, *, keeps_counts: bool, may_change: bool
) -> None:
    """Raise `UserError` unless a mask is one as `search.mask`: two passes over it.

    Args:
        title: of the searcher.
        keeps_counts: whether each tensor must have the active parameters that the layer sparsity asks for.
        may_change: whether it may differ from `search.mask`.
    """
    like = search.mask
    if not isinstance(mask, torch.Tensor):
        raise refusal(title, search, f"{type(mask).__name__} instead of a mask, which must be a tensor")
    for what in ("shape", "dtype", "device"):
        is_, must_be = (getattr(tensor, what) for tensor in (mask, like))
        if is_ != must_be:
            raise refusal(
                title,
                search,
                f"a mask of {what} {_show(is_)}: as search.mask, it must be of {_show(must_be)}",
            )
    counts = search.space.count(mask)
    if counts != search.space.count(mask == 1):
        raise refusal(title, search, "a mask with other values than zeros and ones")
    if keeps_counts and search.active:
        for name, count, wanted in zip(search.space.names, counts, search.active, strict=True):
            if count != wanted:
                raise refusal(
                    title,
                    search,
                    f"a mask with {count:,} active parameters in {name}, where layer_sparsity has {wanted:,}: keep "
                    "each tensor's count, or say that it may change by keeps_counts = False",
                )
    if not may_change and not torch.equal(mask, like):
        raise refusal(
            title,
            search,
            "another mask than before, but says by searches or searching that it does not search",
        )


def _show(fact: object) -> str:
    return str(list(fact) if isinstance(fact, torch.Size) else fact).removeprefix("torch.")


def refusal(title: str, search: SearchInput, what: str) -> UserError:
    """The error of a searcher that gave something wrong."""
    return UserError(f"{title} gave in round {search.round + 1} {what}.")
