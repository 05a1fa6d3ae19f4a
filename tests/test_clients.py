"""Client rows: what each client trains, validates and tests on."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspa.core.errors import UserError
from fedspa.core.tracker import ClientTests
from fedspa.data.digits import Digits
from fedspa.data.sets import ArraySet, Data
from fedspa.partition.base import Partition
from fedspa.partition.client_tests import largest_fitting, largest_remainder
from fedspa.partition.clients import client_rows
from fedspa.partition.dirichlet import Dirichlet
from fedspa.partition.iid import Iid


class Given(Partition):
    """Deals the rows in blocks of given sizes."""

    def __init__(self, *sizes: int) -> None:
        self.name, self.sizes = "given", sizes

    def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return np.split(np.arange(len(labels)), np.cumsum(self.sizes)[:-1])


def labelled(labels: list[int]) -> ArraySet:
    return ArraySet(torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8), torch.tensor(labels))


def source(**changes: object) -> Digits:
    facts = dict(
        name="t", classes=3, channels=1, image_size=2, train_size=99, test_size=99, mean=[0.5], std=[0.5]
    )
    return Digits(**(facts | changes))  # type: ignore[arg-type]


def test_test_rows_follow_the_label_shares_by_largest_remainder() -> None:
    # Client 0: 3 of class 0, 2 of class 1, 1 of class 2; of 10 images: quotas 5, 3.33, 1.67 -> 5, 3, 2.
    data = Data(labelled([0, 0, 0, 1, 1, 2] + [1, 1]), labelled([0, 1, 2] * 30))
    rows = client_rows(data, source(client_test_images=10), Given(6, 2), 2, seed=0)
    assert np.bincount(data.test.targets[rows.test[0]], minlength=3).tolist() == [5, 3, 2]
    assert np.bincount(data.test.targets[rows.test[1]], minlength=3).tolist() == [0, 10, 0]
    assert all(len(np.unique(part)) == len(part) for part in rows.test)  # without replacement
    assert [part.tolist() for part in rows.train] == [[0, 1, 2, 3, 4, 5], [6, 7]]


def test_ceil_rounds_every_class_up_and_stops_at_what_there_is() -> None:
    data = Data(labelled([0, 0, 0, 1, 1, 2]), labelled([0, 1, 2] * 30))
    rounded = client_rows(data, source(client_test_images=10, client_test_rounding="ceil"), Given(6), 1, 0)
    assert np.bincount(data.test.targets[rounded.test[0]]).tolist() == [5, 4, 2]  # 5, 3.33, 1.67 rounded up
    many = client_rows(data, source(client_test_images=90, client_test_rounding="ceil"), Given(6), 1, 0)
    assert np.bincount(data.test.targets[many.test[0]]).tolist() == [30, 30, 15]  # 45 wanted, 30 there


def test_a_scarce_class_shrinks_the_test_set_and_keeps_the_shares() -> None:
    # Even shares, 4 test images of class 1: of 9 images it is asked for 4 (the tie goes to the lower class).
    data = Data(labelled([0, 1]), labelled([0] * 50 + [1] * 4))
    rows = client_rows(data, source(client_test_images=18), Given(2), 1, seed=0)
    assert np.bincount(data.test.targets[rows.test[0]]).tolist() == [5, 4]


def many(**counts: int) -> ArraySet:
    return labelled(
        [label for label, count in zip((0, 1, 2), counts.values(), strict=True) for _ in range(count)]
    )


def test_less_than_half_of_the_test_images_asked_for_is_refused_unless_allowed() -> None:
    data = Data(many(a=100, b=100, c=100), many(a=100, b=100, c=1), ("a", "b", "c"))
    refused = source(client_test_images=100)
    with pytest.raises(
        UserError, match=r"client \d gets \d test images, where dataset.client_test_images=100"
    ) as told:
        client_rows(data, refused, Iid(name="iid"), 3, 0)
    assert "(too few for 3 of 3 clients): class c is" in str(told.value)
    assert "and the test split has 1 of it;" in str(told.value)
    # Both ways out of the sentence work.
    allowed, wanted = (
        re.findall(r"least_test_share=([\d.]+)[ ,.]", str(told.value))[1],
        re.findall(r"client_test_images=(\d+)", str(told.value))[1],
    )
    rows = client_rows(
        data, source(client_test_images=100, least_test_share=float(allowed)), Iid(name="iid"), 3, 0
    )
    sizes = [len(own) for own in rows.test]
    assert min(sizes) == int(wanted) and max(sizes) < 10
    fewer = client_rows(data, source(client_test_images=int(wanted)), Iid(name="iid"), 3, 0)
    assert [len(own) for own in fewer.test] == [int(wanted)] * 3


def test_half_of_the_test_images_asked_for_is_enough() -> None:
    data = Data(labelled([0, 1]), labelled([0] * 50 + [1] * 5))
    rows = client_rows(data, source(client_test_images=22), Given(2), 1, seed=0)
    assert (len(rows.test[0]), rows.asked) == (11, 22)
    with pytest.raises(UserError, match="client 0 gets 11 test images, where dataset.client_test_images=23"):
        client_rows(data, source(client_test_images=23), Given(2), 1, seed=0)


def test_the_share_that_a_refusal_allows_is_exact() -> None:
    data = Data(labelled([0, 1]), labelled([0] * 50 + [1] * 3))
    with pytest.raises(UserError, match="gets 7 test images, .* or dataset.least_test_share=0.07") as told:
        client_rows(data, source(client_test_images=100), Given(2), 1, seed=0)
    assert "test_rows" not in str(told.value)
    rows = client_rows(data, source(client_test_images=100, least_test_share=0.07), Given(2), 1, seed=0)
    assert len(rows.test[0]) == 7  # 0.07 x 100 is 7.000000000000001 in floats


@pytest.mark.parametrize("rounding", ["exact", "ceil"])
def test_a_class_without_test_images_is_named_with_a_way_out_that_works(rounding: str) -> None:
    data = Data(labelled([0, 1]), labelled([0] * 9), ("cat", "dog"))
    nothing = source(client_test_images=3, client_test_rounding=rounding, test_size=9, least_test_share=0)
    with pytest.raises(
        UserError, match="client 1 gets no test image, where .*: class dog is 100.0% of"
    ) as told:
        client_rows(data, nothing, Given(1, 1), 2, seed=0)
    assert "has none of it; use test images of class dog (or no training images of it)." in str(told.value)
    assert "test_rows" not in str(told.value)
    limited = source(client_test_images=3, client_test_rounding=rounding, test_size=99, test_rows=9)
    with pytest.raises(UserError, match="use more than dataset.test_rows=9"):
        client_rows(data, limited, Given(1, 1), 2, seed=0)


@pytest.mark.parametrize("rounding", ["exact", "ceil"])
def test_far_too_many_test_images_are_told_at_once(rounding: str) -> None:
    data = Data(many(a=5000, b=3000, c=1), many(a=1000, b=1000, c=1000), ("a", "b", "c"))
    asked = source(client_test_images=10**15, client_test_rounding=rounding)
    with pytest.raises(UserError, match=f"dataset.client_test_images={10**15}"):
        client_rows(data, asked, Given(8001), 1, 0)
    rows = client_rows(
        data,
        source(client_test_images=10**15, client_test_rounding=rounding, least_test_share=0),
        Given(8001),
        1,
        0,
    )
    # All of class a are 5000/8001 of 1,600: the rest is 599.9 of b and 0.2 of c.
    counts = np.bincount(data.test.targets[rows.test[0]], minlength=3).tolist()
    assert counts == ([1000, 600, 0] if rounding == "exact" else [1000, 1000, 1000])


def test_fewer_test_images_are_counted() -> None:
    tests = ClientTests.of(np.array([100, 53, 88, 100]), 100)
    assert tests == ClientTests(asked=100, smallest=53, median=94.0, fewer=2)
    assert tests.remark(4) == (
        "Test examples of a client: smallest number 53, median 94; 2 of 4 clients have fewer than the 100 asked for"
    )
    assert ClientTests.of(np.array([5, 2, 9]), None) == ClientTests(None, 2, 5.0, 0)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=12).filter(any), st.integers(1, 140))
def test_largest_remainder_adds_up_and_stays_within_one(counts: list[int], total: int) -> None:
    shares = largest_remainder(np.array(counts), total)
    assert shares.sum() == total
    quotas = np.array(counts) * total / sum(counts)
    assert (abs(shares - quotas) < 1).all()
    assert (shares[np.array(counts) == 0] == 0).all()


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), min_size=1, max_size=6).filter(
        lambda pairs: any(count for count, _ in pairs)
    ),
    st.integers(1, 60),
)
def test_the_largest_fitting_size_is_taken(pairs: list[tuple[int, int]], total: int) -> None:
    counts, available = np.array(pairs).T
    take = largest_fitting(counts, total, available)
    assert (take <= available).all()
    for size in range(take.sum() + 1, total + 1):
        assert (largest_remainder(counts, size) > available).any()


def test_validation_rows_come_from_the_clients_own_training_rows() -> None:
    data = Data(labelled([0, 1, 2] * 40), labelled([0, 1, 2] * 40))
    plain = client_rows(data, source(), Iid(name="iid"), 4, seed=3)
    split = client_rows(data, source(val_fraction=0.2), Iid(name="iid"), 4, seed=3)
    for client in range(4):
        assert len(plain.val[client]) == 0
        assert len(split.val[client]) == 6
        together = np.sort(np.concatenate([split.train[client], split.val[client]]))
        assert np.array_equal(together, plain.train[client])
        assert np.array_equal(split.test[client], plain.test[client])  # the shares before the split


def test_validation_needs_two_rows_a_client() -> None:
    data = Data(labelled([0, 1, 1]), labelled([0, 1, 2] * 40))
    with pytest.raises(
        UserError, match="dataset.val_fraction=0.1 needs 2 training rows or more .* client 0 has 1"
    ):
        client_rows(data, source(val_fraction=0.1), Given(1, 2), 2, seed=0)
    tiny = client_rows(data, source(val_fraction=0.9), Given(3), 1, seed=0)
    assert (len(tiny.train[0]), len(tiny.val[0])) == (1, 2)


def test_rows_are_a_function_of_the_seed() -> None:
    data = Data(labelled([0, 1, 2] * 100), labelled([0, 1, 2] * 40))
    first, again, other = (
        client_rows(
            data, source(val_fraction=0.1, client_test_images=40), Dirichlet(name="dirichlet"), 5, seed
        )
        for seed in (0, 0, 1)
    )
    for name in ("train", "val", "test"):
        pairs = zip(getattr(first, name), getattr(again, name), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
    assert not all(np.array_equal(a, b) for a, b in zip(first.test, other.test, strict=True))


def test_public_rows_come_from_every_client_and_belong_to_none() -> None:
    data = Data(labelled([0, 1, 2, 0, 1, 2, 0, 1, 2, 0]), labelled([0, 1, 2] * 30))
    plain = client_rows(data, source(val_fraction=0.2), Given(6, 4), 2, seed=0)
    rows = client_rows(data, source(val_fraction=0.2, public_fraction=0.5), Given(6, 4), 2, seed=0)
    assert [len(part) for part in rows.train] == [3, 1]  # of 5 and 3 beside the validation rows 2 are public
    assert rows.public.tolist() == sorted(rows.public) and len(rows.public) == 4
    for client in range(2):
        assert rows.val[client].tolist() == plain.val[client].tolist()
        assert rows.test[client].tolist() == plain.test[client].tolist()
        own = {*rows.train[client]} | {*rows.public} & {*plain.train[client]}
        assert own == {*plain.train[client]} and not {*rows.train[client]} & {*rows.public}
    assert len(plain.public) == 0
    with pytest.raises(UserError, match="dataset.public_fraction=0.5 needs 2 training rows"):
        client_rows(data, source(public_fraction=0.5), Given(9, 1), 2, seed=0)
