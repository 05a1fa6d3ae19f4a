"""dataset=folder: any folder of image files, its facts told from the files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import tables
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedspa.config import Plan, check
from fedspa.data.source import ImageSet
from fedspa.data.tabular import TableImages, held_out
from fedspa.errors import UserError

Planner = Callable[..., Plan]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    tables.folder(tmp_path / "pets", "train", {"owl": 6, "a cat": 9, "dog": 7})
    return tables.folder(tmp_path / "pets", "test", {"a cat": 2, "owl": 3, "dog": 4})


def source(plan: Planner, path: Path, *overrides: str) -> TableImages:
    found = plan("dataset=folder", f"dataset.path='{path}'", *overrides).dataset
    assert isinstance(found, TableImages)
    return found


def sets(found: TableImages) -> tuple[ImageSet, ImageSet]:
    data = found.load()
    assert isinstance(data.train, ImageSet) and isinstance(data.test, ImageSet)
    return data.train, data.test


def test_facts_pixels_and_classes_come_from_the_files(plan: Planner, pets: Path) -> None:
    found = source(plan, pets)
    facts = (found.name, found.classes, found.channels, found.image_size, found.train_size, found.test_size)
    assert facts == ("pets", 3, 3, 8, 22, 9)
    train, test = sets(found)
    assert found.load().class_names == ("a cat", "dog", "owl")
    assert train.labels.tolist() == [0] * 9 + [1] * 7 + [2] * 6
    assert test.labels.tolist() == [0] * 2 + [1] * 4 + [2] * 3
    for row, file in ((0, "a cat/000"), (10, "dog/001"), (21, "owl/005")):
        assert np.array_equal(
            train.images[row].permute(1, 2, 0), np.asarray(Image.open(pets / f"train/{file}.png"))
        )
    every = train.images.double().numpy() / 255
    assert np.allclose(found.mean, every.mean((0, 2, 3)), atol=1e-4)
    assert np.allclose(found.std, every.std((0, 2, 3)), atol=1e-4)


def test_the_recorded_config_is_described_already(plan: Planner, compose: Callable, pets: Path) -> None:
    first = plan("dataset=folder", f"dataset.path={pets}")
    recorded = compose("dataset=folder")
    recorded.dataset = first.resolved["dataset"] | {"path": None}  # as it is read where the folder is not
    again = check(recorded)
    assert again.config_hash == first.config_hash
    assert asdict(again.dataset) == asdict(first.dataset) | {"path": None}


def facts(found: TableImages) -> list[str]:
    """Overrides that state all that a source was told by its data, but not its version."""
    named = ("classes", "channels", "image_size", "train_size", "test_size", "mean", "std", "test_split")
    return [f"dataset.{name}={getattr(found, name)}" for name in named]


def test_stated_facts_are_pinned_and_grouped_all_the_same(plan: Planner, pets: Path) -> None:
    for split in ("train", "test"):
        files = sorted((pets / split).glob("*/*.png"))
        lines = [f"{file.relative_to(pets / split)},{file.stem[-1]}" for file in files]
        (pets / split / "metadata.csv").write_text("\n".join(["file_name,writer", *lines]) + "\n")
    by_writer = (f"dataset.path={pets}", "partition=column", "partition.column=writer")
    first = plan("dataset=folder", *by_writer)
    again = plan("dataset=folder", *by_writer, *facts(first.dataset))
    assert again.dataset == first.dataset and again.config_hash == first.config_hash
    assert (again.dataset.group_by, len(again.dataset.fingerprint)) == ("writer", 16)
    assert again.dataset.load().train.groups is not None
    with pytest.raises(UserError, match="dataset.group_by=painter and partition.column=writer differ"):
        plan("dataset=folder", *by_writer, *facts(first.dataset), "dataset.group_by=painter")


def test_what_is_not_stated_is_told_by_the_data(plan: Planner, pets: Path) -> None:
    first = source(plan, pets)
    for left_out in ("mean", "test_split", "classes"):
        stated = [fact for fact in facts(first) if not fact.startswith(f"dataset.{left_out}=")]
        assert source(plan, pets, *stated) == first


def test_the_hash_tells_folders_apart_but_not_where_they_lie(plan: Planner, pets: Path) -> None:
    def hashed(path: Path) -> str:
        return plan("dataset=folder", f"dataset.path={path}", "dataset.name=pets").config_hash

    first = hashed(pets)
    moved = pets.rename(pets.parent / "elsewhere")
    assert hashed(moved) == first
    file = moved / "test/dog/003.png"
    file.write_bytes(tables.encoded(tables.pixels(1, seed=5)[0], "BMP"))
    assert hashed(moved) != first
    with pytest.raises(UserError, match="holds other files than those that dataset.fingerprint="):
        old = source(plan, moved)
        file.unlink()
        old.load()


def test_without_a_test_split_a_share_of_each_class_is_held_out(plan: Planner, tmp_path: Path) -> None:
    flat = tables.folder(tmp_path, "flat", {"train": 20, "plane": 10}) / "flat"  # a class may be called train
    found = source(plan, flat, "dataset.test_fraction=0.3")
    assert (found.train_size, found.test_size, found.test_split) == (21, 9, "none")
    assert "a share of 0.3 of each class of split train, the same for every seed" in found.remarks[1]
    train, test = sets(found)
    assert train.labels.bincount().tolist() == [7, 14] and test.labels.bincount().tolist() == [3, 6]
    images = [image.numpy().tobytes() for image in (*train.images, *test.images)]
    assert len(set(images)) == 30
    other = source(plan, flat, "dataset.test_fraction=0.3", "dataset.data_seed=1", "seed=0")
    assert sets(other)[1].images.numpy().tobytes() != test.images.numpy().tobytes()
    assert sets(source(plan, flat, "dataset.test_fraction=0.3", "seed=9"))[1].images.equal(test.images)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0.01, 0.99), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_held_out_share_is_some_of_each_stratum_and_never_all(
    strata: list[int], share: float, seed: int
) -> None:
    chosen = held_out(np.array(strata), share, seed)
    for value in set(strata):
        rows = np.array(strata) == value
        count, taken = rows.sum(), chosen[rows].sum()
        if count == 1:
            assert taken == 0
        else:
            assert 1 <= taken <= count - 1
            assert abs(taken - share * count) <= 1
    assert np.array_equal(chosen, held_out(np.array(strata), share, seed))


def test_a_row_limit_takes_a_sample_not_the_first_class(plan: Planner, pets: Path) -> None:
    found = source(plan, pets, "dataset.train_rows=11", "dataset.test_rows=5")
    train, test = sets(found)
    assert (len(train), len(test), found.train_size, found.test_size) == (11, 5, 22, 9)
    assert len(train.labels.unique()) == 3


def test_validation_is_taken_for_a_test_split_and_said_to_be(plan: Planner, pets: Path) -> None:
    (pets / "test").rename(pets / "validation")
    found = source(plan, pets)
    assert (found.test_split, found.test_size) == ("validation", 9)
    assert found.remarks[1] == "Its test images are those of split validation"


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (["dataset.path=null"], "dataset=folder needs dataset.path="),
        (["dataset.train_split=trian"], "dataset.train_split=trian is no split of .*: did you mean train"),
        (["dataset.test_split=tset"], "dataset.test_split=tset is no split of .*: did you mean test"),
        (["dataset.resize=crop"], "dataset.resize=crop needs a dataset.image_size"),
        (
            ["dataset.resize=corp", "dataset.image_size=8"],
            "dataset.resize=corp is not known: did you mean crop",
        ),
        (["dataset.colour=gray"], "dataset.colour=gray is not known: did you mean grey"),
        (["dataset.classes=4"], "dataset.classes=4 is not so: .* has 3; leave it out"),
        (["dataset.val_fraction=1"], "dataset.val_fraction=1.0 is out of range"),
        (["dataset.label=owner"], "dataset.label=owner is no column of .*, split train: "),
        (["dataset.train_rows=23"], r"dataset.train_rows=23 is out of range: it must be in \[1, 22\]"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    plan: Planner, pets: Path, overrides: list[str], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as told:
        source(plan, pets, *overrides)
    assert "\n" not in str(told.value)


def test_folders_without_images_are_told_apart(plan: Planner, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no folder of images for each class in"):
        source(plan, tmp_path / "empty")
    (tmp_path / "empty/cat").mkdir()
    with pytest.raises(UserError, match="is no folder of images"):
        source(plan, tmp_path / "empty")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is no folder: it must hold"):
        source(plan, tmp_path / "file")
    with pytest.raises(UserError, match="does not exist"):
        source(plan, tmp_path / "nowhere")


def test_a_broken_image_is_named_before_training(plan: Planner, pets: Path) -> None:
    (pets / "test/dog/001.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"split test, row 3 \(from 0\), .*test/dog/001.png: cannot identify"):
        source(plan, pets).load()
    (pets / "train/dog/001.png").write_bytes((pets / "train/dog/001.png").read_bytes()[:60])
    with pytest.raises(UserError, match=r"split train, row 10 \(from 0\), .*train/dog/001.png: "):
        source(plan, pets).load()


def test_images_of_several_sizes_need_a_resize(plan: Planner, pets: Path) -> None:
    Image.new("RGB", (12, 10)).save(pets / "train/dog/001.png")
    with pytest.raises(
        UserError, match=r"row 10 .*dog/001.png, unlike the first ones: the image is 12 x 10 pixels"
    ):
        source(plan, pets)
    train, _ = sets(source(plan, pets, "dataset.image_size=6", "dataset.resize=pad"))
    assert train.images.shape == (22, 3, 6, 6)
    (pets / "train/dog/001.png").unlink()
    with pytest.raises(
        UserError, match="it is 8 x 8 pixels, dataset.image_size=6: set dataset.resize to crop"
    ):
        source(plan, pets, "dataset.image_size=6").load()


def test_columns_of_a_metadata_file_can_label_and_group(plan: Planner, pets: Path) -> None:
    for split in ("train", "test"):
        files = sorted((pets / split).glob("*/*.png"))
        lines = [f"{file.relative_to(pets / split)},{file.stem[-1]}" for file in files]
        (pets / split / "metadata.csv").write_text("\n".join(["file_name,writer", *lines]) + "\n")
    train, _ = sets(source(plan, pets, "dataset.group_by=writer"))
    assert train.groups is not None
    assert train.groups.tolist() == [str(i) for count in (9, 7, 6) for i in range(count)]
    assert train.labels.tolist() == [0] * 9 + [1] * 7 + [2] * 6
    found = source(plan, pets, "dataset.label=writer")
    assert (found.classes, sets(found)[0].labels.tolist()[:4]) == (9, [0, 1, 2, 3])
    with pytest.raises(
        UserError, match=r"dataset.group_by=writers is no column of .*: did you mean writer\?"
    ):
        source(plan, pets, "dataset.group_by=writers")
