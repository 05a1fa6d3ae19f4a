"""dataset=folder: any folder of image files, its facts told from the files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import numpy as np
import pytest
import tables
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedspa.config.plan import Plan, check
from fedspa.core.errors import UserError
from fedspa.data.files import unpacked
from fedspa.data.images import Images
from fedspa.data.sets import ArraySet
from fedspa.data.tables import held_out
from fedspa.partition.clients import client_rows

Planner = Callable[..., Plan]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    tables.folder(tmp_path / "pets", "train", {"owl": 6, "a cat": 9, "dog": 7})
    return tables.folder(tmp_path / "pets", "test", {"a cat": 2, "owl": 3, "dog": 4})


def source(plan: Planner, path: Path, *overrides: str) -> Images:
    found = plan("dataset=folder", f"dataset.path='{path}'", *overrides).dataset
    assert isinstance(found, Images)
    return found


def sets(found: Images) -> tuple[ArraySet, ArraySet]:
    data = found.load()
    assert isinstance(data.train, ArraySet) and isinstance(data.test, ArraySet)
    return data.train, data.test


def test_facts_pixels_and_classes_come_from_the_files(plan: Planner, pets: Path) -> None:
    found = source(plan, pets)
    facts = (found.name, found.classes, found.channels, found.image_size, found.train_size, found.test_size)
    assert facts == ("pets", 3, 3, 8, 22, 9)
    train, test = sets(found)
    assert found.load().class_names == ("a cat", "dog", "owl")
    assert train.targets.tolist() == [0] * 9 + [1] * 7 + [2] * 6
    assert test.targets.tolist() == [0] * 2 + [1] * 4 + [2] * 3
    for row, file in ((0, "a cat/000"), (10, "dog/001"), (21, "owl/005")):
        assert np.array_equal(
            train.inputs[row].permute(1, 2, 0), np.asarray(Image.open(pets / f"train/{file}.png"))
        )
    every = train.inputs.double().numpy() / 255
    assert np.allclose(found.mean, every.mean((0, 2, 3)), atol=1e-4)
    assert np.allclose(found.std, every.std((0, 2, 3)), atol=1e-4)


def test_the_recorded_config_is_described_already(plan: Planner, compose: Callable, pets: Path) -> None:
    first = plan("dataset=folder", f"dataset.path={pets}")
    recorded = compose("dataset=folder")
    recorded.dataset = first.resolved["dataset"] | {"path": None}  # as it is read where the folder is not
    again = check(recorded)
    assert again.config_hash == first.config_hash
    assert asdict(again.dataset) == asdict(first.dataset) | {"path": None}


def facts(found: Images) -> list[str]:
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
    old = source(plan, moved).fingerprint
    file.unlink()
    with pytest.raises(UserError, match="holds other files than those that dataset.fingerprint="):
        source(plan, moved, f"dataset.fingerprint='{old}'")


def test_without_a_test_split_a_share_of_each_class_is_held_out(plan: Planner, tmp_path: Path) -> None:
    flat = tables.folder(tmp_path, "flat", {"truck": 20, "plane": 10}) / "flat"
    found = source(plan, flat, "dataset.test_fraction=0.3")
    assert (found.train_size, found.test_size, found.test_split) == (21, 9, "none")
    assert "a share of 0.3 of each class of split train, the same for every seed" in found.remarks[1]
    train, test = sets(found)
    assert train.targets.bincount().tolist() == [7, 14] and test.targets.bincount().tolist() == [3, 6]
    images = [image.numpy().tobytes() for image in (*train.inputs, *test.inputs)]
    assert len(set(images)) == 30
    other = source(plan, flat, "dataset.test_fraction=0.3", "dataset.data_seed=1", "seed=0")
    assert sets(other)[1].inputs.numpy().tobytes() != test.inputs.numpy().tobytes()
    assert sets(source(plan, flat, "dataset.test_fraction=0.3", "seed=9"))[1].inputs.equal(test.inputs)


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
    assert len(train.targets.unique()) == 3


def test_validation_is_taken_for_a_test_split_and_said_to_be(plan: Planner, pets: Path) -> None:
    (pets / "test").rename(pets / "validation")
    found = source(plan, pets)
    assert (found.test_split, found.test_size) == ("validation", 9)
    assert found.remarks[1] == "Its test images are those of split validation"


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (["dataset.path=null"], "dataset.path=<file or folder> is missing"),
        (
            ["dataset.train_split=trian"],
            "folder test, which looks like a split and would be a class: name the splits",
        ),
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
    with pytest.raises(UserError, match="empty holds no data: it must be a table"):
        source(plan, tmp_path / "empty")
    (tmp_path / "empty/cat").mkdir()
    with pytest.raises(UserError, match="empty holds no data: it must be a table"):
        source(plan, tmp_path / "empty")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="holds no data: it must be a table"):
        source(plan, tmp_path / "file")
    with pytest.raises(UserError, match="does not exist"):
        source(plan, tmp_path / "nowhere")


def test_a_table_without_images_is_told(plan: Planner, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("age,label\n1,a\n2,b\n3,a\n4,b\n")
    with pytest.raises(
        UserError, match="rows.csv, split train holds no images: use dataset=table or dataset=text"
    ):
        source(plan, tmp_path / "rows.csv")


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
    assert train.inputs.shape == (22, 3, 6, 6)
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
    assert train.targets.tolist() == [0] * 9 + [1] * 7 + [2] * 6
    found = source(plan, pets, "dataset.label=writer")
    assert (found.classes, sets(found)[0].targets.tolist()[:4]) == (9, [0, 1, 2, 3])
    with pytest.raises(
        UserError, match=r"dataset.group_by=writers is no column of .*: did you mean writer\?"
    ):
        source(plan, pets, "dataset.group_by=writers")


# ---- layouts


def save(*files: Path) -> None:
    """A small image in each of these files, no two alike."""
    for number, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        kind = "JPEG" if file.suffix.lower() in (".jpg", ".jpeg") else "PNG"
        file.write_bytes(tables.encoded(tables.pixels(1, seed=number)[0], kind))


@pytest.fixture
def clinic(tmp_path: Path) -> Path:
    """A folder a class, in it a folder a patient, 3 images in each; p0 has images of both classes."""
    root = tmp_path / "clinic"
    save(*(root / folder / f"{i}.png" for folder in ("a/p0", "a/p1", "b/p0", "b/p2/left") for i in range(3)))
    return root


def class_counts(found: Images) -> dict[str, int]:
    """Images of each class in both splits."""
    data = found.load()
    labels = np.concatenate([part.targets.numpy() for part in (data.train, data.test)])  # type: ignore[union-attr]
    return dict(zip(data.class_names, np.bincount(labels).tolist(), strict=True))


def test_the_class_is_the_folder_below_the_split_and_not_the_one_of_the_image(
    plan: Planner, clinic: Path
) -> None:
    assert class_counts(source(plan, clinic)) == {"a": 6, "b": 6}
    divided = clinic.parent / "divided"
    divided.mkdir()
    clinic.rename(divided / "train")
    save(divided / "test/a/p9/0.png", divided / "test/b/p9/0.png")
    found = source(plan, divided)
    assert (found.train_size, found.test_size) == (12, 2)
    assert class_counts(found) == {"a": 7, "b": 7}


def test_the_path_below_the_class_is_the_column_folder(plan: Planner, clinic: Path) -> None:
    by_patient = ("partition=column", "partition.column=folder")
    found = source(plan, clinic, *by_patient, "dataset.test_fraction=0.34")
    train, test = sets(found)
    assert train.groups is not None and test.groups is not None
    # p0 has images of a and of b: one patient, of whom 2 of 6 images are held out; of the others 1 of 3.
    held = {name: int((test.groups == name).sum()) for name in set(test.groups)}
    assert held == {"p0": 2, "p1": 1, "p2/left": 1}
    assert {name: int((train.groups == name).sum()) for name in set(train.groups)} == {
        "p0": 4, "p1": 2, "p2/left": 2,
    }  # fmt: skip
    save(clinic / "b/9.png")
    with pytest.raises(UserError, match=r"clinic/b/9.png: the column folder is empty there"):
        source(plan, clinic, *by_patient)
    assert class_counts(source(plan, clinic)) == {"a": 6, "b": 7}


@pytest.mark.parametrize("stray", ["train/stray.png", "stray.JPG"])
def test_an_image_outside_any_class_is_refused_by_its_name(plan: Planner, pets: Path, stray: str) -> None:
    save(pets / stray)
    with pytest.raises(UserError, match=rf"holds an image that lies in no class, {stray}: put it into"):
        source(plan, pets)


def test_files_that_are_no_images_and_hidden_ones_are_ignored(plan: Planner, pets: Path) -> None:
    before = source(plan, pets)
    for junk in (
        "train/__MACOSX/owl", "__MACOSX/train/owl", ".ipynb_checkpoints", "train/.ipynb_checkpoints",
        "train/owl/@eaDir",
    ):  # fmt: skip
        save(pets / junk / "000.png")
    save(pets / "train/owl/._000.png", pets / ".cover.png")
    for name in ("train/.DS_Store", "train/dog/.DS_Store", "README.md", "train/README", "train/owl/all.zip"):
        (pets / name).write_bytes(b"no image")
    found = source(plan, pets)
    assert (found.train_size, found.mean) == (before.train_size, before.mean)
    assert class_counts(found) == {"a cat": 11, "dog": 11, "owl": 9}


def test_a_folder_beside_the_splits_is_neither_a_split_nor_a_class(plan: Planner, clinic: Path) -> None:
    root = clinic.parent / "divided"
    save(
        *(root / "train" / name / f"{i}.png" for name in ("a", "b") for i in range(4)),
        root / "docs/figure.png",
    )
    found = source(plan, root)
    assert class_counts(found) == {"a": 4, "b": 4}


def test_a_split_that_would_be_taken_for_a_class_is_refused(plan: Planner, tmp_path: Path) -> None:
    save(*(tmp_path / split / name / "0.png" for split in ("Training", "Testing") for name in ("a", "b")))
    with pytest.raises(UserError, match="holds the folder (Testing|Training), which looks like a split"):
        source(plan, tmp_path)
    found = source(plan, tmp_path, "dataset.train_split=Training", "dataset.test_split=Testing")
    assert class_counts(found) == {"a": 2, "b": 2}


def test_one_class_is_no_data_to_classify(plan: Planner, tmp_path: Path) -> None:
    save(tmp_path / "pictures/only/0.png", tmp_path / "pictures/only/1.png")
    with pytest.raises(UserError, match="pictures has one class only, only: two or more are needed"):
        source(plan, tmp_path / "pictures")


def test_a_class_of_the_test_split_alone_is_refused(plan: Planner, pets: Path) -> None:
    save(pets / "test/bat/0.png")
    with pytest.raises(
        UserError, match=r"test/bat/0.png: the label bat is no class of the training examples"
    ):
        source(plan, pets)


def test_the_partition_is_blamed_for_its_column(plan: Planner, pets: Path) -> None:
    with pytest.raises(UserError, match=r"^partition.column=nope is no column of .*split train") as told:
        source(plan, pets, "partition=column", "partition.column=nope")
    assert "group_by" not in str(told.value)
    (pets / "train/metadata.csv").write_text("file_name,writer\nowl/000.png,w\n")
    moved = (pets / "test").rename(pets / "elsewhere")
    save(pets / "train/owl/000.png")
    with pytest.raises(UserError, match=r"the column writer is empty there"):  # of all images but one
        source(plan, pets, "partition=column", "partition.column=writer")
    moved.rename(pets / "test")


def test_names_of_all_kinds_of_letters(plan: Planner, tmp_path: Path) -> None:
    root = tmp_path / "a[b]*?"
    save(
        *(root / name / f"{i}.PnG" for name in ("\u00e4 *", "b\nc", "[x]") for i in range(3)),
        root / "[x]/3.JPG",
    )
    assert class_counts(source(plan, root)) == {"[x]": 4, "b\nc": 3, "\u00e4 *": 3}
    (root / "b\nc/1.PnG").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"b\\nc/1.PnG: cannot identify") as told:
        source(plan, root).load()
    assert "\n" not in str(told.value)


def test_a_name_that_is_not_utf8_is_told(plan: Planner, pets: Path) -> None:
    (pets / os.fsdecode(b"notes M\xfcller.txt")).write_text("not an image")
    source(plan, pets)
    image = pets / "train" / "owl" / os.fsdecode(b"M\xfcller.png")
    save(image)
    with pytest.raises(UserError, match="holds an image whose name is not UTF-8, train.*: rename it"):
        source(plan, pets)
    image.unlink()
    save(pets / "train" / os.fsdecode(b"Gr\xfcn") / "0.png")
    with pytest.raises(UserError, match="holds an image whose name is not UTF-8, train.*: rename it"):
        source(plan, pets)


def test_links_to_files_are_followed(plan: Planner, pets: Path) -> None:
    (pets / "train/dog/again").symlink_to(pets)
    outside = pets.parent / "outside"
    save(outside / "0.png")
    (pets / "train/owl/more.png").symlink_to(outside / "0.png")
    assert class_counts(source(plan, pets)) == {"a cat": 11, "dog": 11, "owl": 10}
    (pets / "train/dog/gone.png").symlink_to(pets / "nowhere.png")
    with pytest.raises(UserError, match=r"train/dog/gone.png cannot be read \(No such file"):
        source(plan, pets)


@pytest.mark.parametrize(
    "lines, sentence",
    [
        ("name,writer\nowl/000.png,w", r"metadata.csv has no column file_name \(or filename"),
        (
            "file_name,writer\nowl/nope.png,w",
            "metadata.csv names train/owl/nope.png, but there is no such image",
        ),
        ("file_name,writer\nowl/000.png,v\nowl/000.png,w", "more than one line for train/owl/000.png"),
        ("", "metadata.csv cannot be read as a table"),
    ],
)
def test_metadata_that_does_not_fit_the_images_is_told(
    plan: Planner, pets: Path, lines: str, sentence: str
) -> None:
    (pets / "train/metadata.csv").write_text(lines)
    with pytest.raises(UserError, match=sentence):
        source(plan, pets)


def test_labels_of_metadata_need_no_folders_of_classes(plan: Planner, tmp_path: Path) -> None:
    save(*(tmp_path / f"p{i % 2}/{i}.png" for i in range(8)), tmp_path / "8.png")
    lines = [f"p{i % 2}/{i}.png,{'xyz'[i % 3]}" for i in range(8)] + ["8.png,z"]
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name,finding", *lines]))
    found = source(plan, tmp_path, "dataset.label=finding")
    assert class_counts(found) == {"x": 3, "y": 3, "z": 3}


def test_a_class_missing_from_the_test_split_is_named_with_settings_that_work(
    plan: Planner, tmp_path: Path
) -> None:
    save(*(tmp_path / "train" / name / f"{i}.png" for name in "abc" for i in range(20)))
    save(*(tmp_path / "test" / name / f"{i}.png" for name in "ab" for i in range(20)))
    settings = ("dataset=folder", f"dataset.path={tmp_path}", "partition=iid", "federation.clients=3")
    made = plan(*settings, "federation.clients_per_round=3")
    with pytest.raises(UserError, match=r"class c is .* and the test split has none of it") as told:
        client_rows(made.dataset.load(), made.dataset, made.partition, 3, 0)
    assert "test_rows" not in str(told.value)
    way = str(told.value).partition("; use ")[2].split()[:2]
    assert way == ["dataset.test_split=none", "dataset.client_test_images=4"]
    made = plan(*settings, "federation.clients_per_round=3", *way)
    rows = client_rows(made.dataset.load(), made.dataset, made.partition, 3, 0)
    assert [len(own) for own in rows.test] == [4, 4, 4]


# ---- sizes, tables beside the images, archives


def test_oblong_images_stay_oblong(plan: Planner, tmp_path: Path) -> None:
    root = tables.folder(tmp_path, "flat", {"a": 6, "b": 6}) / "flat"
    for file in root.glob("*/*.png"):
        Image.open(file).resize((12, 5)).save(file)
    found = source(plan, root)
    assert found.image_size == [5, 12] and found.input_shape == (3, 5, 12)
    train, _ = sets(found)
    assert train.inputs.shape[1:] == (3, 5, 12)
    cut = source(plan, root, "dataset.image_size=[4,8]", "dataset.resize=crop")
    assert sets(cut)[0].inputs.shape[1:] == (3, 4, 8)


@pytest.fixture
def album(tmp_path: Path) -> Path:
    """A flat folder of images, and a table with their labels and users."""
    files = [f"{i:02}.png" for i in range(12)]
    save(*(tmp_path / "album" / name for name in files))
    lines = [f"{name},{'xy'[i % 2]},u{i % 3}" for i, name in enumerate(files)]
    (tmp_path / "album/labels.csv").write_text("\n".join(["filename,label,user", *lines]))
    return tmp_path / "album"


def test_a_flat_folder_and_a_table_of_names_labels_and_users(plan: Planner, album: Path) -> None:
    found = source(plan, album, "partition=column", "partition.column=user")
    train, test = sets(found)
    assert train.groups is not None and set(train.groups) == {"u0", "u1", "u2"}
    assert class_counts(found) == {"x": 6, "y": 6}
    text = (album / "labels.csv").read_text()
    (album / "labels.csv").write_text(text.replace(".png", ""))  # names without their ending
    assert sets(source(plan, album))[0].targets.equal(
        sets(source(plan, album, "dataset.label=label"))[0].targets
    )
    (album / "labels.csv").write_text(text.replace("03.png", "333.png"))
    with pytest.raises(UserError, match="labels.csv names 333.png, but there is no such image in"):
        source(plan, album)


@pytest.mark.parametrize("kind", ["zip", "gztar"])
def test_an_archive_is_its_folder(plan: Planner, album: Path, pets: Path, tmp_path: Path, kind: str) -> None:
    for folder in (album, pets):
        whole = source(plan, folder)
        for base in (None, folder.name):  # with the folder, or what is in it
            archive = shutil.make_archive(
                str(tmp_path / f"packed-{base}"), kind, folder if base is None else folder.parent, base
            )
            packed = source(plan, Path(archive))
            assert packed.fingerprint == whole.fingerprint
            assert sets(packed)[0].inputs.equal(sets(whole)[0].inputs)
    Path(archive).write_bytes(Path(archive).read_bytes()[:200])
    with pytest.raises(UserError, match="cannot be unpacked"):
        source(plan, Path(archive))


def test_jobs_that_start_at_once_unpack_an_archive_once(
    album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, unpack, times = (
        shutil.make_archive(str(tmp_path / "packed"), "zip", album),
        shutil.unpack_archive,
        [],
    )
    together = Barrier(2)

    def slow(*args: Any, **options: Any) -> None:
        times.append(args)
        unpack(*args, **options)
        with suppress(BrokenBarrierError):
            together.wait(timeout=1)  # until the other one has unpacked too, if it does

    monkeypatch.setattr(shutil, "unpack_archive", slow)
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(lambda _: unpacked(archive, "dataset.path"), range(2)))
    assert len(folders) == len(times) == 1
