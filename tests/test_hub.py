"""dataset=hub against a stand-in of the hub on 127.0.0.1: the real download code, and what goes wrong with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tables
from hub_server import Hub, environment, redirect, served

from fedspa.config.plan import Plan
from fedspa.core.errors import UserError
from fedspa.data import hub as hub_code
from fedspa.data import tables as table_code
from fedspa.data.images import Images, PublishedImages
from fedspa.data.parts import Part
from fedspa.data.sets import ArraySet, Data
from fedspa.partition.clients import client_rows

Planner = Callable[..., Plan]
TRAIN, TEST = "data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"
PETS = "dataset.name=org/pets"


def pets(train: int = 30, test: int = 9, seed: int = 0) -> dict[str, bytes]:
    """The files of a data set of three classes, written by five writers."""

    def split(count: int, seed: int) -> bytes:
        images = [tables.encoded(p) for p in tables.pixels(count, seed=seed)]
        return tables.parquet(
            images, label=[i % 3 for i in range(count)], writer=[f"w{i % 5}" for i in range(count)]
        )

    return {"README.md": b"---\nlicense: mit\n---\n", TRAIN: split(train, seed), TEST: split(test, seed + 50)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with served() as hub:
        redirect(monkeypatch, hub, tmp_path)
        forget()
        yield hub


def forget() -> None:
    """As a new process: nothing is remembered but what lies in the caches on the disk."""
    from huggingface_hub import HfFileSystem, _tree_cache

    for cached in (hub_code.commit_of, hub_code.builder):
        cached.cache_clear()
    for memory in (table_code._described, _tree_cache._IN_MEMORY_TREE_CACHE):
        memory.clear()  # type: ignore[attr-defined]
    HfFileSystem.clear_instance_cache()


def load(plan: Planner, *overrides: str) -> tuple[Images, ArraySet, ArraySet]:
    source = plan("dataset=hub", *(overrides or [PETS])).dataset
    data = source.load()
    assert isinstance(source, Images) and isinstance(data, Data)
    assert isinstance(data.train, ArraySet) and isinstance(data.test, ArraySet)
    return source, data.train, data.test


def test_a_data_set_is_downloaded_once_described_and_pinned(hub: Hub, plan: Planner) -> None:
    commit = hub.publish("org/pets", pets())
    source, train, test = load(plan)
    facts = (source.classes, source.channels, source.image_size, source.train_size, source.test_size)
    assert facts == (3, 3, 8, 30, 9)
    assert (source.revision, source.subset) == (commit, "default")
    assert np.array_equal(train.inputs.permute(0, 2, 3, 1), tables.pixels(30))
    assert np.array_equal(test.inputs.permute(0, 2, 3, 1), tables.pixels(9, seed=50))
    assert train.targets.tolist() == [i % 3 for i in range(30)]
    assert source.load().class_names == tuple(tables.NAMES)
    assert hub.downloads(TRAIN) == hub.downloads(TEST) == [None]
    forget()
    _, again, _ = load(plan)
    assert again.inputs.equal(train.inputs)
    assert hub.downloads(TRAIN) == [None]


def test_a_recorded_revision_asks_nobody(hub: Hub, plan: Planner) -> None:
    old = hub.publish("org/pets", pets())
    first = plan("dataset=hub", PETS)
    _, train, _ = load(plan)
    new = hub.publish("org/pets", pets(seed=1))
    forget()
    assert plan("dataset=hub", PETS).resolved["dataset"]["revision"] == new
    assert plan("dataset=hub", PETS).config_hash != first.config_hash
    forget()
    hub.asked.clear()
    _, again, _ = load(plan, PETS, f"dataset.revision={old}", "dataset.subset=default")
    assert not hub.asked
    assert again.inputs.equal(train.inputs)


def test_stated_facts_are_pinned_all_the_same(hub: Hub, plan: Planner) -> None:
    commit = hub.publish("org/pets", pets())
    first = plan("dataset=hub", PETS).dataset
    named = ("classes", "channels", "image_size", "train_size", "test_size", "mean", "std", "test_split")
    stated = [PETS, *(f"dataset.{name}={getattr(first, name)}" for name in named)]
    forget()
    again, train, _ = load(plan, *stated)
    assert (again, again.revision, len(train)) == (first, commit, 30)
    with pytest.raises(UserError, match="dataset.revision=v9 is no branch, tag or commit"):
        plan("dataset=hub", *stated, "dataset.revision=v9")


def test_without_a_network_the_cache_serves(
    hub: Hub, plan: Planner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import datasets
    from huggingface_hub import constants

    hub.publish("org/pets", pets())
    first, train, _ = load(plan)
    forget()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    second, again, _ = load(plan)
    assert not hub.asked
    assert (second, again.inputs.equal(train.inputs)) == (first, True)
    with pytest.raises(
        UserError, match="dataset.name=org/others is not in the cache, and the hub cannot be reached"
    ):
        load(plan, "dataset.name=org/others")
    with pytest.raises(UserError, match="has no revision 0{40} to read: it is not in the cache"):
        load(plan, PETS, f"dataset.revision={'0' * 40}")
    with pytest.raises(UserError, match="dataset.subset=fine is no subset|has no revision"):
        load(plan, PETS, "dataset.subset=fine")


def test_a_hub_that_is_down_is_told_or_done_without(hub: Hub, plan: Planner) -> None:
    hub.publish("org/pets", pets())
    hub.failures["api/datasets/org/pets"] = [500] * 50
    with pytest.raises(
        UserError, match=r"dataset.name=org/pets is not in the cache, and the hub cannot be reached \("
    ):
        load(plan)
    hub.failures.clear()
    _, train, _ = load(plan)
    forget()
    hub.failures["/"] = [500] * 500
    _, again, _ = load(plan)
    assert again.inputs.equal(train.inputs)


def test_a_download_that_is_cut_resumes_where_it_was(
    hub: Hub, plan: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 512)  # what was received of a chunk is lost
    hub.publish("org/pets", pets())
    hub.failures[TRAIN] = [-3000, -1500]
    _, train, _ = load(plan)
    assert hub.downloads(TRAIN) == [None, "bytes=2560-", "bytes=3584-"]
    assert np.array_equal(train.inputs.permute(0, 2, 3, 1), tables.pixels(30))


def test_a_download_that_fails_goes_on_with_the_files_that_are_left(hub: Hub, plan: Planner) -> None:
    hub.publish("org/pets", pets())
    hub.failures[TEST] = [500] * 50
    with pytest.raises(
        UserError, match="org/pets cannot be downloaded .*500.*: whole files stay, and the same command"
    ):
        load(plan)
    hub.failures.clear()
    forget()
    hub.asked.clear()
    load(plan)
    assert not hub.downloads(TRAIN)
    assert hub.downloads(TEST) == [None]


@pytest.mark.parametrize(
    "name, sentence",
    [
        (
            "org/pest",
            r"dataset.name=org/pest is no data set of the hub that you may see \(private ones need hf auth login",
        ),
        ("a/b/c", "dataset.name=a/b/c is no name on the hub: it must be <organisation/name>"),
        ("''", r"is missing \(of the hub: dataset=hub dataset.name=<organisation/name>\)"),
    ],
)
def test_a_name_that_is_none_is_told(hub: Hub, plan: Planner, name: str, sentence: str) -> None:
    hub.publish("org/pets", pets())
    with pytest.raises(UserError, match=sentence):
        load(plan, f"dataset.name={name}")


@pytest.mark.parametrize("gate", [401, 403])
def test_a_gated_data_set_is_told(hub: Hub, plan: Planner, gate: int) -> None:
    hub.publish("org/pets", pets())
    hub.repositories["org/pets"].gate = gate
    with pytest.raises(
        UserError, match="dataset.name=org/pets is gated: ask for access on its page .* hf auth login"
    ):
        load(plan)


@pytest.mark.parametrize(
    "override, sentence",
    [
        ("dataset.image=image", r"dataset.image=image is no column of .*, split train: did you mean img\?"),
        (
            "dataset.image=label",
            "dataset.image=label is no image column of .* .it holds int64.: valid are img",
        ),
        ("dataset.label=lable", r"dataset.label=lable is no column of .*: did you mean label\?"),
        (
            "dataset.label=weight",
            "dataset.label=weight is no column of whole numbers or names of .* .it holds float64",
        ),
        ("dataset.revision=v2", "dataset.revision=v2 is no branch, tag or commit of org/pets"),
        (
            "dataset.subset=large",
            r"dataset.subset=large is no subset of dataset.name=org/pets: valid are default",
        ),
        (
            "dataset.test_split=validaton",
            "dataset.test_split=validaton is no split of .*: valid are none, test, train",
        ),
    ],
)
def test_wrong_columns_and_splits_are_told(hub: Hub, plan: Planner, override: str, sentence: str) -> None:
    images = [tables.encoded(p) for p in tables.pixels(6)]
    file = tables.parquet(images, label=[0, 1, 2] * 2, weight=[0.5] * 6)
    hub.publish("org/pets", {TRAIN: file, TEST: file})
    with pytest.raises(UserError, match=sentence):
        load(plan, PETS, override)


def test_a_corrupt_image_is_named_with_its_row(hub: Hub, plan: Planner) -> None:
    images: list[bytes | None] = [tables.encoded(p) for p in tables.pixels(6)]
    good = tables.parquet(images, label=[0, 1, 2] * 2)
    images[4] = b"no picture"
    hub.publish("org/pets", {TRAIN: good, TEST: tables.parquet(images, label=[0, 1, 2] * 2)})
    with pytest.raises(UserError, match=r"name=org/pets, split test, row 4 \(from 0\): cannot identify"):
        load(plan)
    images[4] = None
    hub.publish("org/pets", {TRAIN: tables.parquet(images, label=[0, 1, 2] * 2), TEST: good})
    forget()
    with pytest.raises(
        UserError, match=r"name=org/pets, split train, row 4 \(from 0\): its image cannot be read"
    ):
        load(plan)


def test_a_row_that_names_a_device_is_not_read_for_ever() -> None:
    import datasets

    features = datasets.Features({"image": datasets.Image()})
    cell = {"bytes": None, "path": "/dev/zero"}
    part = Part(datasets.Dataset.from_dict({"image": [cell]}, features), np.array([0]), "here")
    with pytest.raises(UserError, match="here, row 0 .*: its image cannot be read .*/dev/zero is no file"):
        list(Images(name="devices", path="x")._each(part, lambda picture: picture))


def test_labels_may_be_numbers_or_names(hub: Hub, plan: Planner) -> None:
    images = [tables.encoded(p) for p in tables.pixels(4)]
    train = tables.parquet(images, name=["b", "a", "b", "c"], number=[7, 3, 3, 12])
    test = tables.parquet(images, name=["c", "a", "b", "c"], number=[7, 3, 3, 12])
    hub.publish("org/pets", {TRAIN: train, TEST: test})
    with pytest.raises(
        UserError, match="split train has no column of class labels: set dataset.label to name or number"
    ):
        load(plan)
    source, by_name, tested = load(plan, PETS, "dataset.label=name")
    assert (source.classes, by_name.targets.tolist(), tested.targets.tolist()) == (
        3,
        [1, 0, 1, 2],
        [2, 0, 1, 2],
    )
    source, by_number, _ = load(plan, PETS, "dataset.label=number")
    assert (source.classes, by_number.targets.tolist()) == (3, [1, 0, 0, 2])
    assert source.load().class_names == ("3", "7", "12")


def test_labels_that_are_hidden_or_missing_are_told(hub: Hub, plan: Planner) -> None:
    images = [tables.encoded(p) for p in tables.pixels(4)]
    hub.publish("org/pets", {TRAIN: pets()[TRAIN], TEST: tables.parquet(images, label=[0, 1, -1, 2])})
    with pytest.raises(
        UserError,
        match=r"split test, row 2 \(from 0\): the label -1 is no class of the training examples",
    ):
        load(plan)
    assert load(plan, PETS, "dataset.test_split=none")[0].test_size == 6
    hub.publish("org/pets", {TRAIN: tables.parquet(images, label=[0, 1, None, 2])})
    forget()
    with pytest.raises(UserError, match=r"split train, row 2 \(from 0\): the column label is empty there"):
        load(plan)


@pytest.mark.slow
def test_a_whole_run_with_the_real_environment_then_one_without_a_network(tmp_path: Path) -> None:
    """As a user has it: the hub's address and caches come from the environment."""

    def train(folder: str, **changes: str) -> subprocess.CompletedProcess[str]:
        command = [
            *(sys.executable, "src/train.py", "dataset=hub", PETS, "partition=iid", "logger=none"),
            *("federation.clients=3", "federation.clients_per_round=2", "federation.rounds=1"),
            "dataset.client_test_images=4",
            f"hydra.run.dir={tmp_path / folder}",
        ]
        env = os.environ | environment(hub, tmp_path / "home") | changes
        return subprocess.run(
            command, env=env, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=300
        )

    with served() as hub:
        hub.publish("org/pets", pets())
        first = train("first")
        assert first.returncode == 0, first.stderr
        assert "Data: 30 training and 9 test images of 3 x 8 x 8, 3 classes" in first.stdout
        assert "HTTP Request" not in first.stderr
        assert json.loads((tmp_path / "first/partition.json").read_text())["classes"] == tables.NAMES
    second = train("second", HF_HUB_OFFLINE="1")
    assert second.returncode == 0, second.stderr
    for name in ("rounds.csv", "config.yaml", "weights.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (
            [0, 1, 2, 1],
            [0, -1, -1],
            r"split test, row 1 \(from 0\): the label -1 is no class of the training examples",
        ),
        (
            [0, -1, 2, 1],
            [0, 1, 2],
            r"split train, row 1 \(from 0\): the label -1 is no class of the training examples",
        ),
        (
            [0, 1, 1, 0],
            [0, 1, 5],
            r"split test, row 2 \(from 0\): the label 5 is no class of the training examples",
        ),
        (
            ["a", "b", "a", "b"],
            ["a", "", "b"],
            "row 1 .*: the label  is no class of the training examples",
        ),
    ],
)
def test_labels_that_no_training_image_has_add_no_class(
    hub: Hub, plan: Planner, train: list, test: list, message: str
) -> None:
    def split(labels: list[int]) -> bytes:
        return tables.parquet([tables.encoded(p) for p in tables.pixels(len(labels))], animal=labels)

    hub.publish("org/pets", {TRAIN: split(train), TEST: split(test)})
    with pytest.raises(UserError, match=message):
        plan("dataset=hub", PETS, "dataset.label=animal")


def test_clients_by_a_column_have_the_test_images_of_their_value(hub: Hub, plan: Planner) -> None:
    hub.publish("org/pets", pets())
    by_writer = [PETS, "partition=column", "partition.column=writer", "federation.clients=5"]
    made = plan("dataset=hub", *by_writer, "federation.clients_per_round=2")
    data = made.dataset.load()
    rows = client_rows(data, made.dataset, made.partition, 5, 0)
    assert [own.tolist() for own in rows.train] == [list(range(w, 30, 5)) for w in range(5)]
    assert [own.tolist() for own in rows.test] == [list(range(w, 9, 5)) for w in range(5)]
    held = plan("dataset=hub", *by_writer, "federation.clients_per_round=2", "dataset.test_split=none")
    assert (held.dataset.train_size, held.dataset.test_size) == (25, 5)  # a fifth of each writer's six
    rows = client_rows(held.dataset.load(), held.dataset, held.partition, 5, 0)
    assert [(len(train), len(test)) for train, test in zip(rows.train, rows.test, strict=True)] == [
        (5, 1)
    ] * 5
    with pytest.raises(
        UserError, match=r"partition.column=writers is no column of .*: did you mean writer\?"
    ):
        plan("dataset=hub", PETS, "partition=column", "partition.column=writers")


def test_a_published_data_set_is_read_from_the_hub_and_then_from_the_cache(hub: Hub) -> None:
    hub.publish("org/pets", pets())
    shape = dict(classes=3, channels=3, image_size=8, train_size=30, test_size=9, mean=[0.5], std=[0.5])
    first = PublishedImages(name="pets", hub="org/pets", **shape).load()  # type: ignore[arg-type]
    forget()
    hub.failures["/"] = [500] * 500
    again = PublishedImages(name="pets", hub="org/pets", train_rows=7, **shape).load()  # type: ignore[arg-type]
    assert again.train.inputs.equal(first.train.inputs[:7])
    with pytest.raises(
        UserError, match=r"dataset.hub=org/no is not in the cache, .*set dataset.path to a folder"
    ):
        PublishedImages(name="pets", hub="org/no", **shape).load()  # type: ignore[arg-type]
