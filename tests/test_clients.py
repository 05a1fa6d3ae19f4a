"""Client rows: what each client trains, validates and tests on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspa.data.clients import client_rows, largest_fitting, largest_remainder
from fedspa.data.digits import Digits
from fedspa.data.source import ImageData, ImageSet
from fedspa.errors import UserError
from fedspa.partition.base import Partition
from fedspa.partition.dirichlet import Dirichlet
from fedspa.partition.iid import Iid


class Given(Partition):
    """Deals the rows in blocks of given sizes."""

    def __init__(self, *sizes: int) -> None:
        self.name, self.sizes = "given", sizes

    def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return np.split(np.arange(len(labels)), np.cumsum(self.sizes)[:-1])


def labelled(labels: list[int]) -> ImageSet:
    return ImageSet(torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8), torch.tensor(labels))


def source(**changes: object) -> Digits:
    facts = dict(
        name="t", classes=3, channels=1, image_size=2, train_size=99, test_size=99, mean=[0.5], std=[0.5]
    )
    return Digits(**(facts | changes))  # type: ignore[arg-type]


def test_test_rows_follow_the_label_shares_by_largest_remainder() -> None:
    # Client 0: 3 of class 0, 2 of class 1, 1 of class 2; of 10 images: quotas 5, 3.33, 1.67 -> 5, 3, 2.
    data = ImageData(labelled([0, 0, 0, 1, 1, 2] + [1, 1]), labelled([0, 1, 2] * 30))
    rows = client_rows(data, source(client_test_images=10), Given(6, 2), 2, seed=0)
    assert np.bincount(data.test.labels[rows.test[0]], minlength=3).tolist() == [5, 3, 2]
    assert np.bincount(data.test.labels[rows.test[1]], minlength=3).tolist() == [0, 10, 0]
    assert all(len(np.unique(part)) == len(part) for part in rows.test)  # without replacement
    assert [part.tolist() for part in rows.train] == [[0, 1, 2, 3, 4, 5], [6, 7]]


def test_ceil_rounds_every_class_up_and_stops_at_what_there_is() -> None:
    data = ImageData(labelled([0, 0, 0, 1, 1, 2]), labelled([0, 1, 2] * 30))
    rounded = client_rows(data, source(client_test_images=10, client_test_rounding="ceil"), Given(6), 1, 0)
    assert np.bincount(data.test.labels[rounded.test[0]]).tolist() == [5, 4, 2]  # 5, 3.33, 1.67 rounded up
    many = client_rows(data, source(client_test_images=90, client_test_rounding="ceil"), Given(6), 1, 0)
    assert np.bincount(data.test.labels[many.test[0]]).tolist() == [30, 30, 15]  # 45 wanted, 30 there


def test_a_scarce_class_shrinks_the_test_set_and_keeps_the_shares() -> None:
    # Even shares, 4 test images of class 1: of 9 images it is asked for 4 (the tie goes to the lower class).
    data = ImageData(labelled([0, 1]), labelled([0] * 50 + [1] * 4))
    rows = client_rows(data, source(client_test_images=20), Given(2), 1, seed=0)
    assert np.bincount(data.test.labels[rows.test[0]]).tolist() == [5, 4]


def test_a_client_without_any_test_image_is_refused() -> None:
    data = ImageData(labelled([0, 1]), labelled([0] * 9))
    with pytest.raises(UserError, match="client 1 gets no test image: the test set has 0 of class 1"):
        client_rows(data, source(), Given(1, 1), 2, seed=0)


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
    data = ImageData(labelled([0, 1, 2] * 40), labelled([0, 1, 2] * 40))
    plain = client_rows(data, source(), Iid(name="iid"), 4, seed=3)
    split = client_rows(data, source(val_fraction=0.2), Iid(name="iid"), 4, seed=3)
    for client in range(4):
        assert len(plain.val[client]) == 0
        assert len(split.val[client]) == 6
        together = np.sort(np.concatenate([split.train[client], split.val[client]]))
        assert np.array_equal(together, plain.train[client])
        assert np.array_equal(split.test[client], plain.test[client])  # the shares before the split


def test_validation_needs_two_rows_a_client() -> None:
    data = ImageData(labelled([0, 1, 1]), labelled([0, 1, 2] * 40))
    with pytest.raises(
        UserError, match="dataset.val_fraction=0.1 needs 2 training images or more .* client 0 has 1"
    ):
        client_rows(data, source(val_fraction=0.1), Given(1, 2), 2, seed=0)
    tiny = client_rows(data, source(val_fraction=0.9), Given(3), 1, seed=0)
    assert (len(tiny.train[0]), len(tiny.val[0])) == (1, 2)


def test_rows_are_a_function_of_the_seed() -> None:
    data = ImageData(labelled([0, 1, 2] * 100), labelled([0, 1, 2] * 40))
    first, again, other = (
        client_rows(data, source(val_fraction=0.1), Dirichlet(name="dirichlet"), 5, seed)
        for seed in (0, 0, 1)
    )
    for name in ("train", "val", "test"):
        pairs = zip(getattr(first, name), getattr(again, name), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
    assert not all(np.array_equal(a, b) for a, b in zip(first.test, other.test, strict=True))
