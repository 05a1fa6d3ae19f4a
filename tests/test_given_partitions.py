"""partition=column and partition=file: clients that the data or the user gives."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedspa.config.plan import Plan
from fedspa.core.errors import UserError
from fedspa.data.sets import ArraySet, Data
from fedspa.partition.base import partition_hash
from fedspa.partition.clients import client_rows
from fedspa.partition.column import ColumnPartition
from fedspa.partition.file import FilePartition


def images(groups: list[str] | None = None, count: int | None = None, seed: int = 0) -> ArraySet:
    size = len(groups) if groups is not None else int(count or 0)
    draws = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (size, 1, 2, 2), dtype=torch.uint8, generator=draws)
    return ArraySet(
        pixels, torch.arange(size) % 3, None if groups is None else np.array(groups, dtype=object)
    )


def column(**options: Any) -> ColumnPartition:
    return ColumnPartition(name="column", column="writer", **options)


def written(path: Path, **content: Any) -> FilePartition:
    path.write_text(json.dumps(content))
    return FilePartition(name="file", path=str(path))


writers = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60)


# ---- a column


@given(
    writers,
    writers,
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from(["sample", "group", None]),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_clients_hold_whole_values_and_are_tested_on_their_own(
    train: list[str], test: list[str], clients: int, least: int, fewer: str | None, data: st.DataObject
) -> None:
    sizes = Counter(train)
    able = {name for name in sizes if sizes[name] >= least and name in test}
    partition = column(min_size=least, fewer=fewer)
    found = Data(images(train), images(test))
    seed = data.draw(st.integers(0, 9))
    if not able or clients > len(able) or (clients < len(able) and fewer is None):
        with pytest.raises(UserError, match="no value is in both" if not able else f"must be {len(able)}"):
            partition.assign(found, clients, seed)
        return
    assigned = partition.assign(found, clients, seed)
    assert len(assigned.train) == len(assigned.test or ()) == len(assigned.names) == clients
    held = [{train[row] for row in rows} for rows in assigned.train]
    assert sum(map(len, held)) == len(set().union(*held))  # no value is two clients'
    assert set().union(*held) == able if fewer != "sample" else set().union(*held) <= able
    for names, rows, tested in zip(held, assigned.train, assigned.test or (), strict=True):
        assert rows.tolist() == [row for row, name in enumerate(train) if name in names]
        assert tested.tolist() == [row for row, name in enumerate(test) if name in names]
    sizes_of = [len(names) for names in held]
    assert max(sizes_of) - min(sizes_of) <= 1
    again = partition.assign(found, clients, seed)
    assert partition_hash(again.train) == partition_hash(assigned.train)


def test_as_many_clients_as_values_are_in_the_order_of_their_names() -> None:
    assigned = column().assign(Data(images(list("bcab")), images(list("cba"))), 3, 7)
    assert [rows.tolist() for rows in assigned.train] == [[2], [0, 3], [1]]
    assert [rows.tolist() for rows in assigned.test or ()] == [[2], [1], [0]]
    assert assigned.names == ("a", "b", "c")


def test_another_seed_takes_other_values() -> None:
    data = Data(images(list("abcdefgh") * 2), images(list("abcdefgh")))
    taken = {column(fewer="sample").assign(data, 3, seed).names for seed in range(8)}
    assert len(taken) > 3


@pytest.mark.parametrize(
    "train, test, sentence",
    [
        (images(count=4), images(count=4), "partition=column needs a data set with columns"),
        (
            images(list("ab")),
            images(count=2),
            "partition.column=writer is no column of the test split: .*=none holds",
        ),
        (
            images(list("ab")),
            images(list("cd")),
            r"has 0 values \(2 others have .*\): no value is in both splits",
        ),
        (
            images(list("aab")),
            images(list("a")),
            r"has 1 values \(1 others .*\), so federation.clients=2 must be 1, or",
        ),
    ],
)
def test_data_that_has_no_such_clients_is_told(train: ArraySet, test: ArraySet, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        column().assign(Data(train, test), 2, 0)


def test_settings_of_a_column_are_checked(plan: Any) -> None:
    for overrides, sentence in (
        ([], "partition=column needs partition.column="),
        (
            ["partition.column=a", "partition.fewer=smaple"],
            "partition.fewer=smaple is not known: did you mean sample",
        ),
        (["partition.column=a", "partition.min_size=0"], "partition.min_size=0 is out of range"),
    ):
        with pytest.raises(UserError, match=sentence):
            plan("partition=column", *overrides)


# ---- a file


@given(
    st.integers(1, 40).flatmap(
        lambda n: st.tuples(st.just(n), st.permutations(range(n)), st.integers(1, min(n, 6)))
    ),
    st.integers(0, 10),
    st.booleans(),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sound_file_is_taken_as_it_is(
    tmp_path: Path, shape: tuple[int, list[int], int], unused: int, with_test: bool
) -> None:
    count, order, clients = shape
    lists = [part.tolist() for part in np.array_split(np.array(order), clients)]
    data = Data(images(count=count + unused), images(count=9, seed=1))
    test = (
        {"test_rows": [[client % 9, 8] if client % 9 != 8 else [8] for client in range(clients)]}
        if with_test
        else {}
    )
    partition = written(tmp_path / "p.json", train_rows=lists, **test)
    assigned = partition.described().assign(data, clients, 0)
    assert [rows.tolist() for rows in assigned.train] == [sorted(rows) for rows in lists]
    assert [rows.tolist() for rows in assigned.test or ()] == [
        sorted(rows) for rows in test.get("test_rows", [])
    ]
    with pytest.raises(
        UserError, match=f"is a partition of {clients} clients: set federation.clients={clients}"
    ):
        partition.assign(data, clients + 1, 0)


GOOD = {"train_rows": [[0, 5], [1, 2]]}


@pytest.mark.parametrize(
    "content, sentence",
    [
        (
            {"train_rows": [[0, 6], [1]]},
            "has 6 in train_rows of client 0: rows are whole numbers from 0 to 5",
        ),
        ({"train_rows": [[0, -1], [1]]}, "has -1 in train_rows of client 0: rows are whole numbers from 0"),
        ({"train_rows": [[0], [1.5]]}, "has 1.5 in train_rows of client 1"),
        ({"train_rows": [[0], [True]]}, "has true in train_rows of client 1"),
        ({"train_rows": [[0], [None]]}, "has null in train_rows of client 1"),
        ({"train_rows": [[0], ["1"]]}, 'has "1" in train_rows of client 1'),
        ({"train_rows": [[0], [10**30]]}, "has 10000.* in train_rows of client 1"),
        ({"train_rows": [[0, 1, 0], [2]]}, "has row 0 twice in train_rows of client 0"),
        ({"train_rows": [[0, 1], [2, 1]]}, "gives row 1 to client 0 and to client 1"),
        ({"train_rows": [[0], []]}, "has train_rows of client 1 that are no list of rows, or an empty one"),
        ({"train_rows": [[0]]}, "is a partition of 1 clients: set federation.clients=1"),
        ({"train_rows": {"0": [1]}}, "has train_rows that are no list of lists"),
        ({"clients": 9}, "must hold .*train_rows.*save.client_files"),
        ([[0], [1]], "must hold .*train_rows"),
        (
            GOOD | {"test_rows": [[0], [9]]},
            "has 9 in test_rows of client 1: rows are whole numbers from 0 to 3",
        ),
        (GOOD | {"test_rows": [[0]]}, "has test_rows that are not one for each of the 2 clients"),
        (GOOD | {"names": ["a"]}, "has names that are not one for each of the 2 clients"),
        (GOOD | {"data": "beef"}, r"counts the rows of another data set \(hash beef, here \w{16}\)"),
    ],
)
def test_a_faulty_file_is_told_by_client_and_row(tmp_path: Path, content: Any, sentence: str) -> None:
    (tmp_path / "p.json").write_text(json.dumps(content))
    partition = FilePartition(name="file", path=str(tmp_path / "p.json"))
    with pytest.raises(UserError, match=sentence) as told:
        partition.assign(Data(images(count=6), images(count=4)), 2, 0)
    assert "\n" not in str(told.value)


def test_a_file_that_is_none_is_told(tmp_path: Path, plan: Any) -> None:
    (tmp_path / "p.json").write_text("{")
    for path, sentence in (
        ("null", "partition=file needs partition.path="),
        ("/nowhere.json", "partition.path=/nowhere.json is no readable JSON file .No such file"),
        (str(tmp_path), "is no readable JSON file"),
        (str(tmp_path / "p.json"), "is no readable JSON file"),
    ):
        with pytest.raises(UserError, match=sentence):
            plan("partition=file", f"partition.path={path}")


def test_the_hash_is_of_the_rows_not_of_the_place(tmp_path: Path, plan: Any) -> None:
    def planned(name: str, **content: Any) -> Plan:
        written(tmp_path / name, **content)
        return plan("partition=file", f"partition.path={tmp_path / name}")

    one, other = planned("a.json", **GOOD), planned("b.json", **GOOD, comment="the same rows")
    assert one.config_hash == other.config_hash
    assert planned("c.json", train_rows=[[0, 5], [1, 3]]).config_hash != one.config_hash
    (tmp_path / "a.json").write_text(json.dumps({"train_rows": [[0], [1]]}))
    with pytest.raises(UserError, match=r"holds other rows \(\w{16}\) than partition.digest="):
        one.partition.assign(Data(images(count=6), images(count=4)), 2, 0)


def test_the_partition_of_a_run_can_be_used_again(tmp_path: Path, plan: Any) -> None:
    from fedspa.runs.experiment import run

    small = ["federation.clients=6", "federation.clients_per_round=2", "federation.rounds=1", "logger=none"]
    first = run(plan("partition=shards", "seed=3", *small), tmp_path / "first")
    again = plan("partition=file", f"partition.path={tmp_path / 'first'}", "seed=5", *small)
    second = run(again, tmp_path / "second")
    assert second["partition_hash"] == first["partition_hash"]
    one, other = (
        json.loads((tmp_path / name / "partition.json").read_text()) for name in ("first", "second")
    )
    assert one["test_rows"] == other["test_rows"] and one["data"] == other["data"]
    with pytest.raises(UserError, match="counts the rows of another data set"):
        run(
            plan("dataset=synthetic", "partition=file", f"partition.path={tmp_path / 'first'}", *small),
            tmp_path / "x",
        )


def test_a_file_without_test_rows_draws_them_by_label_shares(tmp_path: Path, plan: Any) -> None:
    settings = ["dataset=synthetic", "dataset.client_test_images=9"]
    file = written(tmp_path / "p.json", train_rows=[list(range(0, 30)), list(range(40, 60))])
    given_rows = plan(*settings, "partition=file", f"partition.path={file.path}")
    data = given_rows.dataset.load()
    rows = client_rows(data, given_rows.dataset, given_rows.partition, 2, 0)
    assert [len(test) for test in rows.test] == [9, 9]
    assert [len(train) for train in rows.train] == [30, 20]


def test_the_hash_of_data_sees_pixels_labels_and_order_but_no_layout() -> None:
    one = images(count=6)
    data = Data(one, images(count=4))
    channels_last = one.inputs.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert Data(ArraySet(channels_last, one.targets), images(count=4)).hash == data.hash
    order = torch.tensor([1, 0, 2, 3, 4, 5])
    brighter = one.inputs.clone()
    brighter[3, 0, 1, 1] += 1
    for changed in (
        ArraySet(one.inputs[order], one.targets[order]),
        ArraySet(brighter, one.targets),
        ArraySet(one.inputs, one.targets[order]),
    ):
        assert Data(changed, images(count=4)).hash != data.hash
