"""A partition deals every row once, is repeatable, and refuses in a sentence what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fedspa.core.errors import UserError
from fedspa.core.randomness import numpy_generator
from fedspa.partition.base import Partition, label_counts, partition_hash
from fedspa.partition.dirichlet import Dirichlet
from fedspa.partition.dirichlet_balanced import DirichletBalanced
from fedspa.partition.iid import Iid
from fedspa.partition.shards import Shards

CONF = Path(__file__).parents[1] / "conf"
KINDS: dict[str, Callable[[], Partition]] = {
    "iid": lambda: Iid(name="iid"),
    "dirichlet": lambda: Dirichlet(name="dirichlet", gamma=0.5, min_size=1),
    "dirichlet_balanced": lambda: DirichletBalanced(name="dirichlet_balanced", gamma=0.3),
    "shards": lambda: Shards(name="shards", classes_per_client=2),
}


def rng(seed: int = 0) -> np.random.Generator:
    return numpy_generator(seed, "partition")


def balanced(rows: int, classes: int) -> np.ndarray:
    return np.random.default_rng(7).permutation(np.arange(rows) % classes)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_row_is_dealt_exactly_once(kind: str, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, 12), "clients")
    classes = data.draw(st.integers(2, 6), "classes")
    labels = np.array(data.draw(st.lists(st.integers(0, classes - 1), min_size=1, max_size=150), "labels"))
    try:
        rows = KINDS[kind]().split(labels, clients, rng())
    except UserError:
        return  # too few rows or classes for that many clients
    assert len(rows) == clients
    assert np.concatenate(rows).dtype == np.int64
    assert sorted(np.concatenate(rows)) == list(range(len(labels)))
    assert all(len(part) > 0 and (np.diff(part) > 0).all() for part in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_partition_is_a_function_of_labels_settings_and_seed(kind: str) -> None:
    labels = balanced(600, 6)
    first, again, other = (KINDS[kind]().split(labels, 10, rng(seed)) for seed in (0, 0, 1))
    assert partition_hash(first) == partition_hash(again) != partition_hash(other)


def test_iid_shares_differ_by_one_at_most() -> None:
    sizes = [len(part) for part in Iid(name="iid").split(balanced(103, 4), 10, rng())]
    assert sorted(sizes) == [10] * 7 + [11] * 3


# ---- Dirichlet over the clients


def test_dirichlet_clients_are_unequal_and_of_the_minimum_size() -> None:
    rows = Dirichlet(name="dirichlet", gamma=0.3).split(balanced(50_000, 10), 100, rng())
    sizes = np.array([len(part) for part in rows])
    assert sizes.min() >= 10
    assert sizes.std() > 100  # the published non-IID costs need unequal sizes
    # A client that holds N/K = 500 gets no further class: what it has beyond came with the last one.
    counts = label_counts(balanced(50_000, 10), rows, 10)
    assert ((counts.cumsum(1) - counts)[counts > 0].reshape(-1) < 500).all()


def test_a_full_client_gets_nothing_not_even_by_rounding() -> None:
    for seed in range(50):
        labels = balanced(997, 7)
        counts = label_counts(
            labels, Dirichlet(name="d", gamma=0.5, min_size=1).split(labels, 13, rng(seed)), 7
        )
        before = counts.cumsum(1) - counts
        assert (counts[before >= 997 / 13] == 0).all()


@pytest.mark.parametrize("make", [Dirichlet, DirichletBalanced])
def test_a_huge_gamma_approaches_iid(make: type[Dirichlet] | type[DirichletBalanced]) -> None:
    labels = balanced(10_000, 5)
    counts = label_counts(labels, make(name="d", gamma=1e7).split(labels, 10, rng()), 5)
    # 200 of each class; the balanced one draws its counts, a spread of some 12 (multinomial) is IID's own
    assert abs(counts - 200).max() <= (3 if make is Dirichlet else 60)


@pytest.mark.parametrize("make", [Dirichlet, DirichletBalanced])
def test_a_small_gamma_makes_clients_of_few_classes(make: type[Dirichlet] | type[DirichletBalanced]) -> None:
    def largest_share(gamma: float) -> float:
        counts = label_counts(labels, make(name="d", gamma=gamma).split(labels, 20, rng()), 10)
        return float((counts.max(1) / counts.sum(1)).mean())

    labels = balanced(20_000, 10)
    assert largest_share(0.1) > largest_share(1.0) + 0.1 > largest_share(100.0) + 0.2


def test_the_refusal_names_every_number() -> None:
    with pytest.raises(UserError) as caught:
        Dirichlet(name="d", gamma=0.3, min_size=9, attempts=5).split(balanced(100, 10), 10, rng())
    sentence = str(caught.value)
    for part in (
        "partition.gamma=0.3",
        "N/K = 10.0",
        "partition.min_size=9",
        "attempts=5",
        "best minimum reached was",
    ):
        assert part in sentence


class OneClient:
    """A random stream whose Dirichlet draws give everything to the first client."""

    def __init__(self) -> None:
        self.draws = 0

    def dirichlet(self, concentration: np.ndarray) -> np.ndarray:
        self.draws += 1
        return np.eye(len(concentration))[0]


def test_a_class_that_finds_no_client_is_a_failed_attempt() -> None:
    source = OneClient()
    # The first class fills client 0 beyond N/K = 2, the second finds nobody: 0/0 in the related code.
    with pytest.raises(UserError, match="in partition.attempts=4 attempts: the best minimum reached was 0"):
        Dirichlet(name="d", attempts=4, min_size=1).split(np.array([0, 0, 1, 1]), 2, source)  # type: ignore[arg-type]
    assert source.draws == 8


# ---- equal sizes, few classes


def test_balanced_clients_are_equal_in_size() -> None:
    rows = DirichletBalanced(name="d", gamma=0.1).split(balanced(1003, 10), 20, rng())
    assert sorted(len(part) for part in rows) == [50] * 17 + [51] * 3


@given(st.integers(1, 10), st.integers(1, 30), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_shards_keep_to_their_number_of_classes(per_client: int, clients: int, seed: int) -> None:
    labels = balanced(3000, 10)
    shards = Shards(name="shards", classes_per_client=per_client)
    if clients * per_client < 10:
        with pytest.raises(UserError, match=rf"it must be in \[{-(-10 // clients)}, 10\]"):
            shards.split(labels, clients, rng(seed))
        return
    held = label_counts(labels, shards.split(labels, clients, rng(seed)), 10) > 0
    assert (held.sum(1) == per_client).all()
    assert np.ptp(held.sum(0)) <= 1  # every class has equally many holders


# ---- what all share


def test_more_clients_than_rows_is_refused() -> None:
    with pytest.raises(UserError, match="federation.clients=8 cannot share 5 training rows: .* at most 5"):
        Iid(name="iid").split(balanced(5, 2), 8, rng())


def test_a_client_without_rows_is_refused() -> None:
    class Unfair(Partition):
        def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
            return [np.arange(len(labels)), np.array([]), np.array([])]

    with pytest.raises(UserError, match="partition=unfair leaves 2 of federation.clients=3 without rows"):
        Unfair(name="unfair").split(np.zeros(4, np.int64), 3, rng())


def test_a_partition_that_loses_a_row_is_a_bug_not_a_result() -> None:
    class Lossy(Partition):
        def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
            return [np.array([0, 1]), np.array([1, 2])]

    with pytest.raises(ValueError, match="did not deal every row"):
        Lossy(name="lossy").split(np.zeros(4, np.int64), 2, rng())


def test_the_hash_sees_who_holds_what() -> None:
    one = partition_hash([np.array([0, 1]), np.array([2])])
    assert len(one) == 16
    assert one != partition_hash([np.array([0]), np.array([1, 2])])
    assert one != partition_hash([np.array([2]), np.array([0, 1])])
    assert one == partition_hash([np.array([0, 1], np.int32), np.array([2], np.int32)])


@pytest.mark.parametrize("file", sorted(CONF.glob("partition/*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_partition_builds_with_its_defaults(file: Path) -> None:
    options = OmegaConf.to_container(OmegaConf.load(file))
    built = instantiate(options)
    assert built == type(built)(name=file.stem)  # the YAML repeats the defaults of the class
