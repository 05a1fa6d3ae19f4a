"""Asking a mask searcher, and checking what it answers: a wrong mask would become wrong numbers without a word."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedspa.errors import UserError
from fedspa.masks.base import MaskSearcher, SearchInput


def found_masks(
    searcher: MaskSearcher, searches: Sequence[SearchInput], *, first: bool = False
) -> list[torch.Tensor]:
    """The masks [total] that a searcher finds for clients of one round, in their order.

    `first`: by `first_mask`, else by `next_masks`.

    Raises `UserError` that names the searcher for anything but masks as `search.mask` is one, in the counts that it
    promises (`keeps_counts`); for another mask than before where it says that it does not search; and where it writes
    into what it was given.
    """
    given = [tensor for search in searches for tensor in (search.mask, search.weights)]
    versions = [tensor._version for tensor in given]  # torch counts the writes into a tensor
    found = [searcher.first_mask(search) for search in searches] if first else searcher.next_masks(searches)
    if not isinstance(found, list | tuple) or len(found) != len(searches):
        raise _refusal(searcher, searches[0], f"no list of {len(searches)} masks from next_masks")
    if versions != [tensor._version for tensor in given]:
        raise _refusal(
            searcher, searches[0], "a mask, but wrote into search.mask or search.weights to find it"
        )
    for search, mask in zip(searches, found, strict=True):
        if mask is not search.mask or first:
            _check(
                searcher,
                search,
                mask,
                may_change=first or searcher.searches and searcher.searching(search.round),
            )
    return list(found)


def _check(searcher: MaskSearcher, search: SearchInput, mask: torch.Tensor, *, may_change: bool) -> None:
    """Look at one mask: two passes over it."""
    like = search.mask
    if not isinstance(mask, torch.Tensor):
        raise _refusal(searcher, search, f"{type(mask).__name__} instead of a mask, which must be a tensor")
    for what in ("shape", "dtype", "device"):
        is_, must_be = (getattr(tensor, what) for tensor in (mask, like))
        if is_ != must_be:
            raise _refusal(
                searcher,
                search,
                f"a mask of {what} {_show(is_)}: as search.mask, it must be of {_show(must_be)}",
            )
    counts = search.space.count(mask)
    if counts != search.space.count(mask == 1):
        raise _refusal(searcher, search, "a mask with other values than zeros and ones")
    if searcher.keeps_counts and search.active:
        for name, count, wanted in zip(search.space.names, counts, search.active, strict=True):
            if count != wanted:
                raise _refusal(
                    searcher,
                    search,
                    f"a mask with {count:,} active parameters in {name}, where layer_sparsity has {wanted:,}: keep "
                    "each tensor's count, or say that it may change by keeps_counts = False",
                )
    if not may_change and not torch.equal(mask, like):
        raise _refusal(
            searcher,
            search,
            "another mask than before, but says by searches or searching that it does not search",
        )


def _show(fact: object) -> str:
    return str(list(fact) if isinstance(fact, torch.Size) else fact).removeprefix("torch.")


def _refusal(searcher: MaskSearcher, search: SearchInput, what: str) -> UserError:
    kind = type(searcher)
    return UserError(
        f"mask={searcher.name} ({kind.__module__}.{kind.__qualname__}) gave in round {search.round + 1} {what}."
    )
