"""What a mask searcher answers is looked at before it is used: no run goes on with a mask that is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from federations import small, two_workers

from fedspa.core.errors import UserError
from fedspa.masks.dst import DST
from fedspa.masks.rsm import RSM
from fedspa.masks.snip import SNIP
from fedspa.methods.fedspa import FedSpa


@dataclass(kw_only=True)
class Bad(DST):
    """A searcher that spoils what DST finds."""

    spoil: Callable = lambda search, mask: mask

    def next_mask(self, search):
        return self.spoil(search, super().next_mask(search))


def doubled(search, mask):
    return 2 * mask


def one_more(search, mask):
    other = mask.clone()
    other[torch.nonzero(other == 0)[0]] = 1
    return other


def moved(search, mask):
    """The total stays, but an active parameter of the first tensor goes to one that has inactive ones."""
    other = mask.clone()
    other[torch.nonzero(mask)[0]], other[torch.nonzero(mask == 0)[0]] = 0, 1
    return other


SPOILT = [
    (lambda search, mask: mask.bool(), "a mask that has dtype bool", "float32"),
    (lambda search, mask: mask.double(), "a mask that has dtype float64", "float32"),
    (lambda search, mask: mask[:5], "a mask that has shape [5]", "must have ["),
    (lambda search, mask: mask[None], "a mask that has shape [1, ", "must have ["),
    (lambda search, mask: mask.to("meta"), "a mask that has device meta", "must have cpu"),
    (lambda search, mask: None, "NoneType instead of a mask", "tensor"),
    (lambda search, mask: mask.tolist(), "list instead of a mask", "tensor"),
    (doubled, "other values than zeros and ones", ""),
    (lambda search, mask: mask * float("nan"), "other values than zeros and ones", ""),
    (lambda search, mask: mask - 2 * mask, "other values than zeros and ones", ""),
    (moved, "active parameters in conv1.weight", "counts()"),
    (one_more, "active parameters in ", "counts()"),
    (lambda search, mask: torch.ones_like(mask), "active parameters in ", "counts()"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "what", "right"), SPOILT)
def test_a_wrong_mask_ends_the_run_in_a_sentence_that_names_the_searcher(spoil, what, right):
    run = small(FedSpa(name="fedspa"), Bad(name="bad", spoil=spoil), rounds=2)
    with pytest.raises(UserError) as caught:
        run.run()
    told = str(caught.value)
    assert told.startswith("mask=bad (test_mask_checks.Bad) gave in round 1 ")
    assert what in told and right in told
    assert torch.equal(run.weights, run.initial)


@pytest.mark.parametrize("name", ["mask", "weights", "start"])
def test_a_searcher_must_not_write_into_its_input(name):
    def writes(search, mask):
        getattr(search, name)[:5] = 0
        return mask

    with pytest.raises(UserError, match=rf"^mask=bad \(test_mask_checks.Bad\) wrote into search.{name}, "):
        small(FedSpa(name="fedspa"), Bad(name="bad", spoil=writes)).run()


def test_counts_by_tensor_are_kept_and_a_searcher_may_say_that_it_keeps_none():
    def drops_one(search, mask):
        other = mask.clone()
        other[torch.nonzero(other)[0]] = 0
        return other

    class Free(Bad):
        def counts(self, round):
            return self.target if round < 0 else None

    with pytest.raises(UserError, match="active parameters in conv1.weight"):
        small(FedSpa(name="fedspa"), Bad(name="bad", spoil=drops_one)).run()
    run = small(FedSpa(name="fedspa"), Free(name="free", spoil=drops_one))
    before = run.loop.state.mask(0).active
    run.run()
    assert {run.loop.state.mask(client).active for client in run.loop.state.clients} <= {
        before - n for n in (1, 2, 3)
    }


def test_a_first_mask_is_looked_at_too():
    class Dense(SNIP):
        def first_mask(self, search):
            return search.mask

    with pytest.raises(UserError, match=r"mask=dense .* active parameters in "):
        small(FedSpa(name="fedspa"), Dense(name="dense", scope="tensor")).run()


def test_a_mask_must_not_change_where_the_searcher_says_that_it_stays():
    class Restless(RSM):
        def next_mask(self, search):
            return search.mask.flip(0)

        def counts(self, round):
            return self.target if round < 0 else None

    with pytest.raises(UserError, match=r"mask=restless .* another mask than before"):
        small(FedSpa(name="fedspa"), Restless(name="restless")).run()


def test_the_sentence_comes_out_of_a_worker_process():
    run = small(
        FedSpa(name="fedspa"),
        Bad(name="bad", spoil=doubled),
        executor=two_workers,
    )
    try:
        with pytest.raises(UserError, match="mask=bad .* other values than zeros and ones"):
            run.run()
    finally:
        run.close()
